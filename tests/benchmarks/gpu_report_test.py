"""The report of a GPU, run on a CPU at tiny shapes: its numbers by hand, and what it imports."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import DEVICES

from draftsmith.benchmarks import gpu_report
from draftsmith.benchmarks.gpu_report import GpuReportConfig, Machine, Subjects, ideal_s, timed_rounds

SMALL = {"shape": "tiny", "batches": "1,3", "prompt": 32, "new_tokens": 12, "repeats": 1, "tokens": 256}
SMALL |= {"device": "cpu", "document": 64, "ttt_steps": 2, "num_workers": 0}
# What a borrowed machine may lack: none of these is imported.
LACKING = ("datasets", "wandb", "deepspeed", "altair", "pandas", "hypothesis", "accelerate", "httpx")


def report(output: Path, **changes) -> dict[str, float]:
    """Make a report and return its numbers, all of which are finite."""
    gpu_report.run(GpuReportConfig(output=output, **{**SMALL, **changes}))
    found = json.loads((output / "gpu.json").read_text())["rows"]
    rows = {row["what"]: row["value"] for row in found}
    assert len(rows) == len(found) and all(map(math.isfinite, rows.values()))
    assert (output / "gpu.md").read_text().count("\n") == 2 + len(rows)
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_a_report_from_end_to_end(tmp_path, device):
    rows = report(tmp_path, device=device)
    assert all(value > 0 for name, value in rows.items() if "waiting" not in name)
    for what in (*(f"{method}, 1 row" for method in gpu_report.METHODS), "ar, 3 rows"):
        # No faster than what the machine allows; on a CPU what is cached may be read faster than a copy is made.
        assert rows[f"{what}: achieved / ideal"] < 1
    assert all(0 <= value < 100 for name, value in rows.items() if name.endswith("waiting for data"))
    assert all(0.5 < value < 2 for name, value in rows.items() if name.endswith("planned / measured"))


def test_ideal_times_by_hand():
    """Compute times of rounds of five drafted tokens: bytes over bandwidth, or products where these take longer."""
    config = GpuReportConfig(output=Path("."), **SMALL)
    subjects = Subjects.of(config)
    weights = subjects.models.target.model
    read = sum(p.numel() for name, p in weights.named_parameters() if "embed" not in name)
    assert subjects.target_bytes == 4 * read and subjects.token_bytes == 2 * 24 * 32 * 4
    draft = sum(p.numel() for p in subjects.models.draft.model.parameters()) - 64 * 32
    assert subjects.draft_bytes["draft"] == 4 * draft
    assert subjects.draft_bytes["eagle"] == 4 * (
        sum(p.numel() for p in subjects.models.heads["eagle"].parameters()) + 64 * 32
    )
    taken, made = timed_rounds(config, subjects.models, "eagle:k=5", 1)
    steps = made[0].trace.steps
    cache = (32 + 6) * subjects.token_bytes
    slow_memory, slow_products = Machine(1e9, 1e30, 4), Machine(1e30, 1e9, 4)
    calls = sum(step.draft_calls for step in steps)
    by_bytes = (len(steps) * (4 * read + cache) + calls * subjects.draft_bytes["eagle"]) / 1e9
    assert ideal_s(config, subjects, slow_memory, "eagle:k=5", made) == pytest.approx(by_bytes)
    inputs = sum(step.num_drafted + 1 for step in steps)
    by_products = 2 * (inputs * read + calls * subjects.draft_bytes["eagle"] / 4) / 1e9
    assert ideal_s(config, subjects, slow_products, "eagle:k=5", made) == pytest.approx(by_products)
    assert taken > 0 and calls > 0


def test_it_imports_what_a_borrowed_machine_has():
    code = "import sys, draftsmith.benchmarks.gpu, draftsmith.train.fit, draftsmith.train.plan\n"
    code += f"print([name for name in {LACKING} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"
