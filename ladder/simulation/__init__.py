"""Machines on paper, and what is true of them."""
