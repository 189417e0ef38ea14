"""What a drafter would have drafted at every position of the target's text, from which settings are replayed."""
