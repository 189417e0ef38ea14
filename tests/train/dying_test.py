"""A rank that dies ends the job at once, with its own error on top, and the job goes on from where it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_jobs import run_job
from trained_runs import losses, weights

from draftsmith.train.checkpoints import FOLDER, all_in

pytestmark = pytest.mark.slow

DYING = str(Path(__file__).resolve().parents[1] / "dying_rank.py")
# Far below the half hour after which a collective gives up, and far above what a machine under load needs.
PATIENCE_S = 300


def settings(artifacts, output: Path) -> dict[str, object]:
    made = {"data": artifacts.acceptance, "draft": artifacts.draft, "output": output, "lr": 2e-3, "batch_size": 8}
    made |= {"val_share": 0.25, "val_every": 6, "save_every": 1, "log_every": 1, "num_threads": 1}
    made |= {"max_steps": 6, "accelerator": "cpu", "accumulate": 2}
    return {name: str(value) if isinstance(value, Path) else value for name, value in made.items()}


def die(artifacts, output: Path, how: str, launcher: tuple[str, ...], *more: str) -> subprocess.CompletedProcess:
    words = [word for name, value in settings(artifacts, output).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, DYING, how, "1", "train", "acceptance", *words, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE_S)


def test_torchrun_reports_the_error_of_the_rank_that_failed(artifacts, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = die(artifacts, tmp_path / "run", "raise", launcher, "--strategy", "deepspeed_stage_2")
    assert result.returncode == 1
    cause = result.stderr.split("Root Cause (first observed failure)")[1]
    assert "rank      : 1" in cause and "RuntimeError: the memory of this rank is broken" in cause


def test_a_killed_rank_ends_the_others_and_the_run_goes_on(artifacts, tmp_path):
    output, unbroken = tmp_path / "run", tmp_path / "unbroken"
    result = die(artifacts, output, "kill", (), "--devices", "2")
    assert result.returncode != 0
    assert all_in(output / FOLDER)[-1].name == "step-00000003"  # killed within step 4, after its first part
    run_job({"head": "acceptance", "config": {**settings(artifacts, unbroken)}})
    run_job({"head": "acceptance", "config": settings(artifacts, output)})
    assert losses(output) == pytest.approx(losses(unbroken), abs=1e-5, rel=0)
    ours, theirs = weights(output), weights(unbroken)
    assert all(float((ours[name] - theirs[name]).abs().max()) < 1e-6 for name in theirs)
