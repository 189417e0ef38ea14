"""Choosing method and settings for one machine, one pair and one user's prompts, mostly without decoding."""
