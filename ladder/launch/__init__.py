"""Starts the ranks of a trial, watches them and ends them."""
