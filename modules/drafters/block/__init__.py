"""Drafters of whole blocks: DFlash and DSpark."""
