"""What ranks report, and what is made of it."""
