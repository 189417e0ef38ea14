"""EAGLE head: drafts from the target's own features (Li et al. 2024, both papers)."""
