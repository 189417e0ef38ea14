"""Scripts that repeat the papers' experiments on any pair of models: `python benchmarks/papers/NAME.py --help`."""
