"""A step of training as operations, and its memory, read off a walk through them."""
