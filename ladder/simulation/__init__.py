"""Simulated machines, and how candidates behave on them."""
