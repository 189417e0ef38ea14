"""Models and tokenizers by the names that users write: where they are, what identifies them, how they are loaded."""
