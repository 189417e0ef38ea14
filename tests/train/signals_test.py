"""Exit codes after signals; tests/cluster checks the same in a real SLURM job."""

from __future__ import annotations

import os
import signal

import pytest

from draftsmith.train.callbacks import exit_code


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
