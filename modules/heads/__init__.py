"""Trainable heads, one file each; the file's name is the head's registry name."""
