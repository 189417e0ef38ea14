"""What a report of a problem has with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from draftsmith.launch.cli import main


@pytest.fixture
def told(capsys, monkeypatch) -> dict:
    monkeypatch.setenv("WANDB_API_KEY", "secret-0123456789")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_machine_and_its_kernels(told):
    cores = len(os.sched_getaffinity(0))
    assert told["machine"]["cores"].startswith(f"{cores} usable, ")
    gib = float(told["machine"]["memory"].split()[0]) * 2**20
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert gib == pytest.approx(total, rel=0.02)
    assert told["machine"]["CPU vectors"] == torch.backends.cpu.get_cpu_capability()
    assert told["machine"]["OMP_NUM_THREADS"] == "3"


def test_no_secret_and_no_path_is_shown(told):
    text = json.dumps(told)
    assert told["machine"]["Weights & Biases key"] == "found"
    assert "secret" not in text and str(Path.home()) + "/" not in text and str(Path.cwd()) not in text
