"""What a tune runs on."""
