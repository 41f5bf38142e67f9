"""How programs of one rank say to `side_by_side.py` why they ended."""

OUT_OF_MEMORY = 3
CANNOT_RUN = 4
"""A finder does not run here; a line of the output that begins with CANNOT says why."""
CANNOT = "It cannot run here: "
