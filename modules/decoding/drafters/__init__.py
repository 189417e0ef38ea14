"""Drafters, one file each: whatever proposes tokens without being a trained head."""
