"""What a machine needs for trials, checked one thing at a time, each with its remedy."""
