"""Measurement: benchmarks, sweeps, losslessness, calibration, latency and reports."""
