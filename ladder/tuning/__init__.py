"""A tune: from what the user asks for to a proven answer."""
