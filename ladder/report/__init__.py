"""Tables and figures from a run: the numbers are gathered in one place and drawn in others."""
