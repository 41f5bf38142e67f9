"""When a technique that is there to save memory is worth a trial."""

SURE = 0.85
"""Of the limit: what is predicted to take more, before any trial, is not sure to fit. Chosen: the prior's worst error
on recorded sweeps is 14 %."""
WORTH = 0.15
"""Of the limit: the technique has to save more, so that what it saves is what was too much. Chosen with `SURE`."""
