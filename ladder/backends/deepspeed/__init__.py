"""DeepSpeed: the configuration of an engine, its memory and its time."""
