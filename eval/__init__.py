"""Measurement: benchmarks, sweeps, certificates and reports."""
