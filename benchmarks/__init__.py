"""What measures Draftsmith itself. Not in the wheel: `python benchmarks/NAME.py --help` in a checkout."""
