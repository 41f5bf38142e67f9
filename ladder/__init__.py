"""ladder: finds, by short real trials, the fastest DeepSpeed configuration that fits."""

__version__ = "0.1.0"
