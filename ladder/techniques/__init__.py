"""What an engine can be made of beside its rung, one file each."""
