"""One writer a directory: real processes, one of them killed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import signal
import subprocess
import sys
import types

import pytest
from forked import forked

from draftsmith.data.store.writer import LOCK, occupied, sole_writer, writing_alone
from draftsmith.launch.commands import COMMANDS
from draftsmith.modules.pretrained import files
from draftsmith.modules.pretrained.files import write_text
from draftsmith.modules.types import InputError
from draftsmith.train import command as train_command

HOLD = """
import os, sys, time
from pathlib import Path
from draftsmith.data.store.writer import writing_alone
with writing_alone(Path(sys.argv[1])):
    if os.fork() == 0:  # a worker that outlives its parent
        time.sleep(60)
    (Path(sys.argv[1]) / "half.txt").write_text("half")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds `tmp_path / "out"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    with contextlib.suppress(ProcessLookupError):  # the test has killed it
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_writer_is_refused_until_the_first_is_killed(holder, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="where another process writes"), writing_alone(tmp_path / "out"):
        pytest.fail("two writers")
    with monkeypatch.context() as rank_1:  # writes beside rank 0
        rank_1.setenv("RANK", "1")
        rank_1.setenv("WORLD_SIZE", "2")
        config = types.SimpleNamespace(output=tmp_path / "out")
        assert sole_writer(shared=True)(lambda config: "written")(config) == "written"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    # Its child holds the lock for a moment longer.
    with writing_alone(tmp_path / "out"):
        assert occupied(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["half.txt"]


def test_every_command_with_an_output_directory_is_alone_in_it():
    """Of the source: `sole_writer` on what writes, or `writing_alone` in it."""
    writes = {}
    for name, command in COMMANDS.items():
        config_class = command.config_class()
        fields = {field.name for field in dataclasses.fields(config_class)}
        # These two write single files.
        if "output" in fields and name not in {"eval compare", "eval report"}:
            # Trainings are begun by a command that also diagnoses them.
            module = (
                train_command if name.startswith("train ") else inspect.getmodule(inspect.unwrap(command.function()))
            )
            writes[name] = inspect.getsource(module)
    assert len(writes) > 15
    for name, source in writes.items():
        assert "@sole_writer(" in source or re.search(r"with writing_alone\((config\.)?output", source), name


def test_a_process_may_hold_a_directory_twice_and_leaves_nothing(tmp_path):
    with writing_alone(tmp_path / "out"), writing_alone(tmp_path / "out"):
        assert not occupied(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["manifest.json", "prompts.parquet", "stages.json"])
def test_what_a_killed_writer_left_is_gone_with_the_next_one_and_what_another_writes_stays(tmp_path, monkeypatch, name):
    def write() -> None:
        monkeypatch.setattr(files, "publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with writing_alone(tmp_path / "out"):
            write_text(tmp_path / "out" / name, "half")

    process = forked(write)
    process.join()
    assert process.exitcode == -signal.SIGKILL and list((tmp_path / "out").glob(f"{name}.tmp-*"))
    # A rank that writes beside the one that cleans; and the user's own.
    (tmp_path / "out" / f"{name}.tmp-mine").touch()
    with files.whole(tmp_path / "out" / "shard") as written, writing_alone(tmp_path / "out"):
        written.write_text("whole")
        assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != LOCK) == sorted(
            [written.name, f"{name}.tmp-mine"]
        )
    assert (tmp_path / "out" / "shard").read_text() == "whole"
