"""SpecDec++'s script runs on few prompts of the embedded models, and its regression agrees with exact rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.benchmarks.papers import specdecpp
from draftsmith.benchmarks.papers.specdecpp import ForwardTimes
from draftsmith.launch.cli import main_of

SMALL = ["--limit", "2", "--max-new-tokens", "20", "--repeats", "1"]


def results_of(directory: Path) -> dict[str, list]:
    """Return rows by the name of their table."""
    return {
        table["name"]: table.get("rows", []) for table in json.loads((directory / "results.json").read_text())["tables"]
    }


def test_specdecpp_runs(tmp_path):
    """specdecpp.sh is a script of commands that a user has on the path."""
    (tmp_path / "draftsmith").write_text(f'#!/bin/sh\nexec {sys.executable} -m draftsmith "$@"\n')
    (tmp_path / "draftsmith").chmod(0o755)
    small = {
        "TRAIN_PROMPTS": "4",
        "LABEL_PROMPTS": "2",
        "NEW_TOKENS": "20",
        "WEIGHTS": "6",
        "DEPTHS": "0",
        "EPOCHS": "1",
    }
    out = tmp_path / "run"
    env = {**os.environ, **small, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    subprocess.run(["sh", Path(specdecpp.__file__).with_suffix(".sh")], env=env, check=True, capture_output=True)
    words = [*SMALL, "--heads", str(out / "heads"), "--labels", str(out / "data"), "--dev-prompts", "2"]
    words += ["--ks", "2", "--ks", "4", "--thresholds", "0.5", "--max-drafted", "4", "--output", str(out / "results")]
    assert main_of(specdecpp.SpecDecPPConfig, specdecpp.run, words) == 0
    tables = results_of(out / "results")
    assert [row["role"] for row in tables["specdecpp-throughput"]][:2] == [specdecpp.BEST_K, specdecpp.BEST_T]
    assert tables["specdecpp-kl"] and tables["specdecpp-forward-times"]


def test_forward_times_are_recovered_from_exact_rows():
    counts = [(3, 2), (10, 4), (7, 9), (0, 5)]
    rows = [{"num_draft_tokens": d, "num_target_calls": t, "cpu_s": 0.2 * d + 1.5 * t} for d, t in counts]
    rows = [{"method": "spec", **row} for row in rows]
    rows.append({"method": "ar", "num_draft_tokens": 0, "num_target_calls": 5, "cpu_s": 1.0})  # whose calls are shorter
    times = ForwardTimes.fit(rows, "cpu")
    assert (times.t_draft, times.t_target, times.r2) == pytest.approx((0.2, 1.5, 1.0))
