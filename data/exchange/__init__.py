"""Heads between this package and other systems: read, written and compared as those systems do."""
