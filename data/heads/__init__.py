"""Head directories and their model cards."""
