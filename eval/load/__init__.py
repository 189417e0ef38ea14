"""Many requests at once: what methods, and servers, are worth under load."""
