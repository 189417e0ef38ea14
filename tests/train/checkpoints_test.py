"""Checkpoint directories: whole or absent, checked, and pruned."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked

from draftsmith.modules.types import InputError
from draftsmith.train.checkpoints import MANIFEST, STATE, Checkpoints, all_in, newest_intact, path_of, step_of


def content(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((64,), float(step))}}


def saved(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(keep, {"world_size": 1})
    for step in steps:
        checkpoints.save_checkpoint(content(step), path_of(folder, step))
        assert not checkpoints.failure
    return checkpoints


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in all_in(folder)]


def damaged_state(path: Path) -> None:
    data = bytearray((path / STATE).read_bytes())
    data[len(data) // 2] ^= 1
    (path / STATE).write_bytes(data)


def truncated_state(path: Path) -> None:
    (path / STATE).write_bytes((path / STATE).read_bytes()[:-100])


DAMAGES = {
    "sha": damaged_state,
    "short": truncated_state,
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "no state": lambda path: (path / MANIFEST).write_text('{"files": {}}'),
}


def test_only_the_newest_are_kept_in_numerical_order(tmp_path):
    saved(tmp_path, 5, 99_999_999, keep=5)
    saved(tmp_path, 100_000_000, 100_000_001, keep=2)
    assert steps(tmp_path) == [100_000_000, 100_000_001]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_then_replaced(tmp_path, damage, capsys):
    saved(tmp_path, 4, 8)
    damage(path_of(tmp_path, 8))
    assert newest_intact(tmp_path) == path_of(tmp_path, 4)
    assert capsys.readouterr().err.count(f"{path_of(tmp_path, 8)} is damaged") == 1
    saved(tmp_path, 6)  # the run that goes on from step 4 saves in another rhythm
    assert steps(tmp_path) == [4, 6]
    path_of(tmp_path, 8).mkdir()
    saved(tmp_path, 8)
    assert newest_intact(tmp_path) == path_of(tmp_path, 8) and capsys.readouterr().err == ""


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    assert newest_intact(tmp_path) is None
    saved(tmp_path, 4)
    damaged_state(path_of(tmp_path, 4))
    with pytest.raises(InputError, match="only damaged checkpoints"):
        newest_intact(tmp_path)


def test_leftovers_of_a_kill_are_removed(tmp_path):
    saved(tmp_path, 4)
    for rest in (".step-00000008.tmp-71-0a1b2c", "step-00000002.tmp-gone"):
        (tmp_path / rest).mkdir()
        (tmp_path / rest / STATE).write_bytes(b"half")
    # A run that was killed in its last save saves nothing more.
    assert newest_intact(tmp_path) == path_of(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_tensors_and_plain_values_only(tmp_path):
    class Planted:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    checkpoints = Checkpoints(2, {})
    checkpoints.save_checkpoint({**content(1), "more": Planted()}, path_of(tmp_path, 1))
    with pytest.raises(InputError, match=r"state\.pt: found no checkpoint of ours \(UnpicklingError\)"):
        checkpoints.load_checkpoint(path_of(tmp_path, 1))
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_keeps_the_earlier_checkpoints(tmp_path):
    """A limit on file sizes stands for the disk's end: the operating system refuses the same calls with an OSError. At
    any point of the file, inside a record of torch's writer included; in a process of its own."""
    saved(tmp_path, 4)
    found, said = multiprocessing.Pipe(duplex=False)

    def save() -> None:
        checkpoints = Checkpoints(2, {})
        content = {"global_step": 8, "state_dict": {"a": torch.zeros(5000), "b": torch.zeros(20000)}}
        for room in (0, 200, 3000, 60000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            checkpoints.save_checkpoint(content, path_of(tmp_path, 8))
            said.send(str(checkpoints.failure))

    process = forked(save)
    process.join()
    assert process.exitcode == 0
    assert all("File too large" in found.recv() for _ in range(4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert newest_intact(tmp_path) == path_of(tmp_path, 4)
