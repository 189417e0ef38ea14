"""Lossless speculative decoding: trees, verification, stop rules, the loop and its counts."""
