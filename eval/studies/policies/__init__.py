"""Acceptance heads beside every other way to end a draft."""
