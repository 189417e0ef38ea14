"""Training with Lightning: modules, data, strategies, callbacks and entry points."""
