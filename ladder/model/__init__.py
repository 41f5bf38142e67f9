"""What is trained: from a name to a shape."""
