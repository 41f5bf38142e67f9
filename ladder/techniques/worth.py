"""When a technique that saves memory is worth a trial."""

SURE = 0.85
"""A candidate that is predicted to need more than this fraction of the limit may not fit. Chosen: the largest error of
predictions before any trial is 14 % on recorded sweeps."""
WORTH = 0.15
"""The technique must save more than this fraction of the limit. Chosen to match `SURE`."""
