"""The bare loop of the throughput benchmark takes the same steps as a training, and steps are timed in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.benchmarks import throughput
from draftsmith.benchmarks.throughput import (
    BareLoop,
    ThroughputConfig,
    TimedStep,
    Workload,
    paired_steps,
    slowdown,
    tokens_per_s,
    train_ours,
)
from draftsmith.launch.cli import main_of

TINY = ThroughputConfig(output=Path("absent"), hidden=64, vocab=48, tokens=160, documents=12, scale=0.1)


def test_the_bare_loop_takes_the_steps_of_a_training(tmp_path):
    """Batches, loss, gradient, clipping, optimizer and schedule are the same: losses agree step by step."""
    work = Workload(TINY)
    config = work.training_config(tmp_path / "run", steps=7, noise=0.0)
    ours, loop = train_ours(work, config), BareLoop(work, config)
    theirs = [loop.step() for _ in ours]
    assert len(ours) == 6
    assert [step.tokens for step in ours] == [step.tokens for step in theirs]
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], rel=1e-5)
    assert len({round(step.loss, 4) for step in ours}) > 3  # else the schedule would not matter


def test_both_loops_are_timed_on_the_same_steps():
    ours, theirs = paired_steps(Workload(TINY), 3, warm_up=1)
    assert len(ours) == len(theirs) == 3
    assert [step.tokens for step in ours] == [step.tokens for step in theirs]
    assert all(step.seconds > 0 for step in ours + theirs)


def test_rates_are_ratios_of_sums_and_the_slowdown_is_a_median_of_pairs():
    ours = [TimedStep(100, 0.0, 1.0), TimedStep(300, 0.0, 2.2), TimedStep(50, 0.0, 3.0)]
    bare = [TimedStep(100, 0.0, 1.0), TimedStep(300, 0.0, 2.0), TimedStep(50, 0.0, 2.0)]
    assert tokens_per_s(ours) == pytest.approx(450 / 6.2)
    assert slowdown(ours, bare) == pytest.approx(10.0)


def test_the_script_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "measured_peak", lambda *_: 1e9)
    words = ["--hidden", "64", "--vocab", "48", "--tokens", "160", "--documents", "4", "--scale", "0.1"]
    assert main_of(ThroughputConfig, throughput.run, [*words, "--steps", "2", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert len(rows) == 4 and all(row["value"] == row["value"] for row in rows)
    assert (tmp_path / "throughput.md").read_text().startswith("| what | value | aim |")
