"""Checks of what other systems compute from a head: by their rules, and in their engines."""
