"""Cost of training steps, with a clock that the tests set."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.types import FeatureBatch
from draftsmith.train import tracking
from draftsmith.train.data import MicroBatch, SampleKey
from draftsmith.train.tracking import Telemetry, listed_peak, peak_memory_gb

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Training on one rank: steps of 2 x 10 slots with 7 + 8 tokens and 600 FLOPs."""

    def __init__(self, peak: float | None = 1000.0):
        self.clock = Clock()
        self.telemetry = Telemetry(self.clock, peak)
        self.telemetry.start(CPU, "32")

    def step(self, waits: float, works: float) -> None:
        ids = torch.zeros(2, 10, dtype=torch.int64)
        batch = FeatureBatch(ids, torch.zeros(2, 10, 4), ids.bool(), ids)
        part = MicroBatch(batch, (SampleKey(0, 0), SampleKey(0, 1)), (7, 8), 5)
        self.clock.now += waits
        self.telemetry.begin([part], lambda part: 600.0)
        self.clock.now += works
        self.telemetry.end()

    def take(self) -> dict[str, float]:
        metrics = self.telemetry.take(CPU)
        assert metrics.pop("memory_gb", 1.0) > 0
        return metrics


def test_a_window_counts_tokens_flops_and_waiting():
    run = Run()
    run.step(waits=0.5, works=1.5)
    run.step(waits=0.3, works=1.7)
    assert run.take() == pytest.approx(
        {
            "steps_per_s": 2 / 4,
            "tokens_per_s": 30 / 4,
            "data_wait": 0.8 / 4,
            "real_tokens": 15 / 20,
            "mfu": 1200 / 4000,
        }
    )
    run.step(waits=0.0, works=1.0)  # a window of its own
    assert run.take() == pytest.approx(
        {"steps_per_s": 1, "tokens_per_s": 15, "data_wait": 0, "real_tokens": 0.75, "mfu": 0.6}
    )


def test_time_between_steps_does_not_count():
    run = Run()
    run.step(waits=0.5, works=1.5)
    run.clock.now += 50  # a validation
    run.telemetry.resume()
    run.step(waits=0.5, works=1.5)
    metrics = run.take()
    assert metrics["steps_per_s"] == pytest.approx(0.5) and metrics["data_wait"] == pytest.approx(0.25)


def test_ranks_add_up_and_the_fullest_memory_counts(monkeypatch):
    """Two ranks: 2 steps in 4 s each; the second has half the tokens, waited 2 s, holds more and has twice the peak."""

    def two(rows: torch.Tensor) -> torch.Tensor:
        own = rows[0]
        other = torch.tensor([own[0], own[1] / 2, own[2], own[3], 2.0, own[5], own[6] + 5, own[7] * 2])
        return torch.stack([own, other.double()])

    run = Run()
    run.step(0.0, 2.0)
    run.step(0.0, 2.0)
    monkeypatch.setattr(tracking, "gather_rows", two)
    metrics = run.telemetry.take(CPU)
    assert metrics.pop("memory_gb") == pytest.approx(peak_memory_gb(CPU) + 5, rel=0.01)
    assert metrics == pytest.approx(
        {
            "steps_per_s": 0.5,
            "tokens_per_s": 45 / 4,
            "data_wait": 2 / 8,
            "real_tokens": 45 / 80,
            "mfu": 2400 / (4 * 3000),
        }
    )


def test_listed_peaks_by_device_name():
    peaks = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA L4": 121e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA GeForce GTX 1080": None,
    }
    assert {name: listed_peak(name, "bf16", tf32=False) for name in peaks} == peaks
    assert [listed_peak("NVIDIA A100-SXM4-40GB", "32", tf32=tf32) for tf32 in (True, False)] == [156e12, 19.5e12]
