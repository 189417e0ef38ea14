"""Load and save target models and heads: the only part of `modules/` that reads and writes files."""
