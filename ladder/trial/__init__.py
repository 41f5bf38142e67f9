"""What runs inside the ranks: the only place that imports torch, deepspeed and transformers."""
