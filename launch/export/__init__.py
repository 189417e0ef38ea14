"""Commands that bring heads to other systems and back: export, import."""
