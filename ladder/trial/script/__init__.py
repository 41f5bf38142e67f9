"""A user's own script as the trial: it is run unchanged, and its training is taken hold of where it begins."""
