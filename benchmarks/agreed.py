"""What programs that train, and those that start and read them, agree on."""

OUT_OF_MEMORY = 3
CANNOT_RUN = 4
"""A finder does not run here; a line of the output that begins with CANNOT says why."""
CANNOT = "It cannot run here: "
MOST = 20
"""Timed steps that count: the last ones. Chosen: with the usual four seconds, as exact as 1 % on a quiet host."""
LONGEST = 570.0
"""Seconds of a way, real training included. Chosen: a run has to end within ten minutes."""
BUDGET = 360.0
"""Of these for the search. Chosen: the rest is for the real training and for two starts."""
PROVEN = 3
"""Optimizer steps with a size until it counts as found. Chosen: the default of Lightning's finder."""
SLOWER = 0.97
"""A micro-batch below this share of the fastest ends the search, as whoever tries by hand stops there. Chosen."""
