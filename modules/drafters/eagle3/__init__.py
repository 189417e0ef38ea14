"""EAGLE-3: drafts from several layers of the target, trained on its own states (Li et al. 2025)."""
