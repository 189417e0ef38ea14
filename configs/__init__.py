"""YAML configurations that ship with the package; no code."""
