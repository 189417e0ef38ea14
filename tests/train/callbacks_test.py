"""Exit codes and warnings at the end of a training."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from trainings import a_module, losses

from draftsmith.modules.types import InputError
from draftsmith.train import callbacks
from draftsmith.train.callbacks import Progress, exit_code, mismatch, untested_lengths
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config


def test_progress_says_while_it_validates(monkeypatch):
    """The steps stand still then, and a log would show nothing else for minutes."""
    states = []
    monkeypatch.setattr(callbacks, "progress_bar", lambda *_, state, **__: states.append(state) or nullcontext())
    head, run_state = SimpleNamespace(kind="eagle3"), SimpleNamespace(time_limit=None)
    module = SimpleNamespace(state=run_state, total_steps=3, head=head, logged={"train/loss": 2.5})
    trainer = SimpleNamespace(global_step=1, validating=False)
    Progress(None).on_train_start(trainer, module)
    assert states[0]() == "; training loss 2.5"
    trainer.validating = True
    assert states[0]() == "; validating"


@pytest.mark.parametrize(
    ("metrics", "warns"),
    [
        ({"tau": 2.0, "tau_general": 1.6}, True),
        ({"tau": 2.0, "tau_general": 1.9}, False),
        ({"tau": 1.6, "tau_general": 2.0}, False),
        # Not measured: prompts to be served are given, or the models are those that ship.
        ({"tau": 2.0}, False),
        ({}, False),
    ],
)
def test_text_unlike_the_training_is_named(metrics, warns):
    assert mismatch(metrics)[:22] == ("warning: tau is 2.00 o" if warns else "")


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Replace SLURM's program; return a function that lists its calls. STUB_CODE: its exit code."""
    program, record = tmp_path / "scontrol", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >>{record}\necho "scontrol: not allowed" >&2\nexit "$STUB_CODE"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("STUB_CODE", "0")
    return lambda: record.read_text().splitlines() if record.exists() else []


def test_sigusr1_requeues_the_job_once(scontrol, monkeypatch, capsys):
    assert exit_code(signal.SIGUSR1) == 0
    assert scontrol() == ["requeue 42"] and "to requeue job 42" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code(signal.SIGUSR1) == 0
    assert len(scontrol()) == 1


def test_a_job_that_cannot_be_requeued_fails_with_the_reason(scontrol, monkeypatch, capsys):
    monkeypatch.setenv("STUB_CODE", "1")
    assert exit_code(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert "job 42 cannot be requeued: scontrol: not allowed" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert exit_code(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert "scontrol" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_other_signals_the_job_is_not_requeued(scontrol, number):
    assert exit_code(number) == 128 + number
    assert scontrol() == []


def test_without_tau_best_is_chosen_by_the_first_tokens(artifacts, tmp_path):
    settings = {"data": artifacts.responses, "target": str(artifacts.target), "output": tmp_path, "layers": (0, 1)}
    settings |= {"max_steps": 6, "val_every": 2, "lr": 3e-3, "tau_prompts": 0, "loggers": ("csv",)}
    best = run(drafter_config("eagle3")(**settings))
    right = losses(tmp_path, "val/top1")
    step = json.loads((best / "manifest.json").read_text())["step"]
    assert len(right) == 3 and step == 2 * max(n for n, share in enumerate(right, 1) if share == max(right))
    shutil.rmtree(best)
    with pytest.raises(InputError, match="a finished training whose best/ is gone"):
        run(drafter_config("eagle3")(**settings))


def test_texts_longer_than_any_row_are_said_to_be_untested(artifacts, tmp_path):
    module = a_module(artifacts, tmp_path)
    assert untested_lengths(module, np.array([8, 33])) == ""
    assert "the longest row has 32 tokens and the target reads 256: drafts" in untested_lengths(module, np.array([32]))
