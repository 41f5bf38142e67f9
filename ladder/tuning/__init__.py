"""One tune: from the user's options to a proven answer."""
