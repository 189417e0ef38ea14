"""Drafters, learned and training-free: whatever proposes tokens for a target to verify."""
