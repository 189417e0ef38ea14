"""What measures Draftsmith itself, and what makes the models that ship with it (embedded/). Not in the wheel:
`python benchmarks/NAME.py --help` in a checkout."""
