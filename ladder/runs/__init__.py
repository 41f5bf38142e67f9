"""The run folder: history, journal, snapshot, and reading a stored run."""
