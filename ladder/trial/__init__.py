"""The code that runs inside the ranks: the only package that imports torch, deepspeed and transformers."""
