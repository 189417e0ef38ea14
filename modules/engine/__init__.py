"""Transformer layers and caches for decoding."""
