"""Files are there whole or not at all, on a disk that is full too: a real one, where the tests may mount it."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from forked import forked

from draftsmith.modules.pretrained import files
from draftsmith.modules.pretrained.files import (
    CannotWrite,
    append,
    copy_file,
    whole_directory,
    write_json,
    write_table,
    write_tensors,
    write_text,
)
from draftsmith.modules.pretrained.reading import misfits, read_lines
from draftsmith.modules.types import InputError


@pytest.mark.parametrize("write", [write_text, append], ids=["whole", "appended"])
def test_a_pipe_or_a_device_is_never_replaced_by_a_file(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CannotWrite, match=r"pipe: found .*a pipe.*, expected a file"):
        write(pipe, "text")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.fixture
def full_disk(tmp_path_factory):
    """A file system of 64 KiB with 8 of them free."""
    place = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "draftsmith-test", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    (place / "filler").write_bytes(bytes(56 * 1024))
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_limit_of_file_sizes_leaves_what_was_there(tmp_path):
    """The operating system refuses each file beyond 300 bytes."""
    path = tmp_path / "kept"
    path.write_text("before")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        with pytest.raises(CannotWrite, match="File too large"):
            write_text(path, "x" * 20_000)

    process = forked(limited)
    process.join()
    assert process.exitcode == 0 and path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


WRITERS = {
    "text": lambda path: write_text(path, "x" * 20_000),
    "JSON": lambda path: write_json(path, ["x"] * 9_000),
    "tensors": lambda path: write_tensors(path, {"a": torch.zeros(9_000)}),
    "table": lambda path: write_table(path, pa.table({"a": list(range(20_000))})),
    "copy": lambda path: copy_file(Path(torch.__file__), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_does_not_fit_leaves_what_was_there(full_disk, name):
    path = full_disk / "kept"
    path.write_text("before")
    with pytest.raises(CannotWrite, match=r"kept: found No space left on device.*Free some space"):
        WRITERS[name](path)
    assert path.read_text() == "before"
    assert sorted(found.name for found in full_disk.iterdir()) == ["filler", "kept"]
    path.unlink()


def test_a_line_that_does_not_fit_is_taken_back(full_disk):
    path = full_disk / "journal"
    append(path, "one\n")
    with pytest.raises(CannotWrite, match="No space left"):
        append(path, "x" * 20_000 + "\n")
    assert path.read_text() == "one\n"
    path.unlink()


def test_a_directory_is_replaced_whole(tmp_path):
    with whole_directory(tmp_path / "d") as partial:
        (partial / "a").touch()
    with pytest.raises(KeyError), whole_directory(tmp_path / "d") as partial:
        (partial / "b").touch()
        raise KeyError
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_directory_is_replaced_beside_the_users_own(tmp_path):
    """A backup is often called so. What another process is writing is left alone, too."""
    own = ["d", "d.old", "d.tmp", ".d.tmp", ".d.old-mine", ".d.tmp-1-abc", "d2"]
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    with whole_directory(tmp_path / "d") as first:
        (first / "first").touch()
        with whole_directory(tmp_path / "d") as second:
            (second / "second").touch()
        assert (first / "first").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own)
    assert all((tmp_path / name / "kept").exists() for name in own[1:])
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["first"]


@pytest.mark.parametrize("killed_at", ["writing", "between the renames"])
def test_what_a_killed_process_left_of_a_directory_is_cleared_and_nothing_is_lost(tmp_path, killed_at, monkeypatch):
    def killed(*_) -> None:
        os._exit(0)

    def write(name: str) -> None:
        with whole_directory(tmp_path / "d") as partial:
            (partial / name).touch()
            if name == "half" and killed_at == "writing":
                killed()

    write("before")
    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda *_: False)  # as on file systems that cannot
        patch.setattr(files, "publish", killed)
        process = forked(write, "half")
        process.join()
    assert process.exitcode == 0 and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(KeyError), whole_directory(tmp_path / "d"):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["before"]


def test_a_reader_always_finds_a_directory_that_is_replaced_again_and_again(tmp_path):
    def replace() -> None:
        for number in range(1, 100):
            with whole_directory(tmp_path / "d") as partial:
                (partial / "number").write_text(str(number))

    with whole_directory(tmp_path / "d") as partial:
        (partial / "number").write_text("0")
    process, found = forked(replace), {"0"}
    while process.is_alive():
        found.add((tmp_path / "d" / "number").read_text())
    process.join()
    assert process.exitcode == 0 and len(found) > 5
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_half_a_surrogate_pair_is_written(tmp_path):
    write_json(tmp_path / "a.json", {"text": "a\ud800b"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"text": "a\ud800b"}
    write_text(tmp_path / "a.txt", "a\ud800b")
    assert (tmp_path / "a.txt").read_text() == "a?b"


@pytest.mark.parametrize(
    ("found", "shape", "wrong"),
    [
        ({"a": 1}, {"a": int}, None),
        ({"a": 1, "later": None}, {"a": int, "b?": str}, None),
        ({"a": True}, {"a": int}, "a: true"),
        ({"a": [{"b": "c"}, {"b": 3}]}, {"a": [{"b": str}]}, "a[1].b: 3"),
        ({"a": {"x": 1, "y": "2"}}, {"a": {"*": int}}, 'a.y: "2"'),
        ({"a": {"b": 1}}, {"a": ({"b": str}, None)}, 'a: {"b": 1}'),
        ([], {"a": int}, "[]"),
    ],
)
def test_what_does_not_fit_a_shape_is_named(found, shape, wrong):
    said = next(misfits(found, shape), None)
    assert said is None if wrong is None else said is not None and said[0] == wrong


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    (tmp_path / "lines").write_text('{"a": 1}\n{"a"')
    with pytest.raises(InputError, match="damaged in line 2"):
        list(read_lines(tmp_path / "lines", {"a": int}))


@pytest.mark.parametrize("kind", ["text", "tensors"])
def test_a_rank_that_clears_leftovers_takes_no_file_that_another_is_writing(tmp_path, kind):
    def clear() -> None:
        while not (tmp_path / "stop").exists():
            files.clear_files(tmp_path)

    def write(number: int) -> None:
        if kind == "text":
            write_text(tmp_path / "record", str(number))
        else:
            write_tensors(tmp_path / "record", {"number": torch.tensor(number)})

    other = multiprocessing.get_context("fork").Process(target=clear)
    other.start()
    try:
        for number in range(300):
            write(number)
    finally:
        (tmp_path / "stop").touch()
        other.join()
    assert other.exitcode == 0 and (tmp_path / "record").exists()


def test_safetensors_own_temporary_file_goes_an_hour_after_a_kill(tmp_path):
    for name, age in ((".tmpAbC123", 3700), (".tmpAbC124", 3500), (".tmpfile", 3700)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    files.clear_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".tmpAbC124", ".tmpfile"}
