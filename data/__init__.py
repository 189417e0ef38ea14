"""The data stages: each reads a manifest, writes a directory of shards and its own manifest last."""
