"""EAGLE-3: drafts from three layers of the target, trained on its own states (Li et al. 2025)."""
