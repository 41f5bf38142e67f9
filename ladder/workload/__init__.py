"""What is trained: model shape, task, sequence length, dtype, optimizer, global batch."""
