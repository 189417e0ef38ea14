"""Artifacts on disk: shards, manifests, and how every file is written and read."""
