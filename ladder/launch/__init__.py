"""Starts ranks, watches them, and ends them, all of them."""
