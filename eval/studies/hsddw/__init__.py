"""The experiments of HSDDW (Syu and Lee 2025)."""
