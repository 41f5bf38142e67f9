"""DeepSpeed: the configuration of engines, and formulas for their memory and time."""
