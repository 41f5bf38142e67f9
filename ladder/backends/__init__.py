"""What runs an engine: its configuration, its memory and time, one room each."""
