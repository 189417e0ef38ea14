"""Heads between this project and other systems: export, import, and the check that both mean the same by them."""
