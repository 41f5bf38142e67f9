"""The machine that a tune runs on."""
