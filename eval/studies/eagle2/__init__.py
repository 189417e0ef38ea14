"""The experiments of EAGLE-2 (Li et al. 2024)."""
