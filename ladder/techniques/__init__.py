"""Techniques and ways of checkpointing that an engine can use besides its rung, one file each."""
