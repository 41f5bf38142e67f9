"""Decides what to try next. Pure functions: the same history gives the same decision; no process, file or clock."""
