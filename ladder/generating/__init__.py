"""Generating with a model: the ways to hold it, what each takes of memory, and what is tried next. Pure."""
