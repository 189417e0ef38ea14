"""One writer a directory: real processes, one of them killed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import signal
import socket
import subprocess
import sys

import pytest
from tiny_world import make_tiny_world

from draftsmith.data.store import writer
from draftsmith.data.store.writer import HOLDER, LOCK, occupied, read_holder, sole_writer, writing_alone
from draftsmith.launch.cli import main
from draftsmith.launch.commands import COMMANDS
from draftsmith.modules.types import InputError

HOLD = """
import os, sys, time
from pathlib import Path
from draftsmith.data.store.writer import writing_alone
with writing_alone(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:  # a worker that outlives its parent
        time.sleep(60)
    (Path(sys.argv[1]) / "half.txt").write_text("half")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds `tmp_path / "out"`."""
    started: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "out"), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # the test has killed it
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_second_writer_is_told_who_is_there(holder, tmp_path):
    process = holder()
    with pytest.raises(InputError) as told, writing_alone(tmp_path / "out"):
        pytest.fail("two writers")
    for part in (f"process {process.pid} on {socket.gethostname()}", "since 2", "Wait for its end"):
        assert part in str(told.value)
    assert read_holder(tmp_path / "out").pid == process.pid


@pytest.mark.parametrize("more", [(), ("forks",)], ids=["alone", "with a child that lives on"])
def test_a_killed_writer_is_followed_at_once(holder, tmp_path, capsys, more):
    process = holder(*more)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with writing_alone(tmp_path / "out"):
        assert read_holder(tmp_path / "out").pid == os.getpid()
    assert f"process {process.pid}" in (said := capsys.readouterr().err) and "taking over" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["half.txt"]


def test_two_benches_into_one_output(holder, tmp_path, capsys):
    """The command of the issue. The first one is held open by a process that has the directory."""
    world = make_tiny_world(tmp_path)
    words = ["eval", "bench", "--target", world["target"], "--draft", world["draft"], "--prompts", world["prompts"]]
    words += ["--methods", "spec:k=2", "--limit", "2", "--repeats", "1", "--max-new-tokens", "4"]
    process = holder()
    capsys.readouterr()
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"process {process.pid}" in said
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "results.json" in names and not {LOCK, HOLDER} & names


def test_every_command_with_an_output_directory_is_alone_in_it():
    """Of the source: `sole_writer` on what writes, or `writing_alone` in it."""
    writes = {}
    for name, command in COMMANDS.items():
        config_class = command.config_class()
        fields = {field.name for field in dataclasses.fields(config_class)}
        # Plans write nothing, these two single files.
        if "output" in fields and name.split()[0] != "plan" and name not in {"eval compare", "eval report"}:
            writes[name] = inspect.getsource(inspect.getmodule(inspect.unwrap(command.function())))
    assert len(writes) > 15
    for name, source in writes.items():
        assert "@sole_writer(" in source or "with writing_alone(config.output)" in source, name


def test_a_process_may_hold_a_directory_twice_and_leaves_nothing(tmp_path):
    with writing_alone(tmp_path / "out"), writing_alone(tmp_path / "out"):
        assert not occupied(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "kept").mkdir()
    with writing_alone(tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
        assert occupied(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def test_ranks_of_one_job_write_together_and_not_into_anothers(tmp_path, monkeypatch):
    @sole_writer(shared=True)
    def run(config):
        return read_holder(config.output)

    class Config:
        output = tmp_path / "out"

    monkeypatch.setattr(writer, "OWN_JOB_S", 0.4)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "first"}.items():
        monkeypatch.setenv(name, value)
    with writing_alone(Config.output, shared=True):
        assert read_holder(Config.output).job == "torchrun first"
        monkeypatch.setenv("RANK", "1")
        assert run(Config).pid == os.getpid()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
        with pytest.raises(InputError, match="where process"):
            run(Config)
        monkeypatch.setenv("RANK", "0")
    assert not Config.output.exists()


def test_a_damaged_holder_file_keeps_nobody_out(tmp_path):
    (tmp_path / HOLDER).write_text("{")
    with writing_alone(tmp_path):
        assert read_holder(tmp_path).pid == os.getpid()
