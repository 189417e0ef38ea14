"""The experiments of SpecDec++ (Huang et al. 2024)."""
