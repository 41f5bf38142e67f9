"""Checks of everything that trials need, each with a remedy."""
