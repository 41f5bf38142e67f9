"""What programs of one rank and those that start and read them agree on."""

OUT_OF_MEMORY = 3
CANNOT_RUN = 4
"""A finder does not run here; a line of the output that begins with CANNOT says why."""
CANNOT = "It cannot run here: "
MOST = 20
"""Timed steps that count: the last ones. Chosen: with the usual four seconds, as exact as 1 % on a quiet host."""
