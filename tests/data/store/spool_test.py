"""Rows go through a spool once each, in few files, and nothing is left behind."""

from __future__ import annotations

import threading

import pytest
import torch

from draftsmith.data.store import feature_codec, spool
from draftsmith.data.store.spool import SpoolReader, SpoolWriter, is_folder, row_name


def a_row(number: int) -> tuple[str, dict[str, torch.Tensor]]:
    return row_name([number]), feature_codec.encode(torch.full((3, 4), float(number)), "fp8")


def test_rows_that_arrive_while_a_file_is_written_share_the_next_one(tmp_path):
    reader, errors = SpoolReader(tmp_path, "a"), list[str]()
    writer, release = SpoolWriter(tmp_path, errors.append), threading.Event()
    for number in range(20):
        name, stored = a_row(number)
        assert reader.expect(name)
        writer.put("a", name, stored, (lambda: release.wait(10)) if number == 0 else lambda: None)
    assert not list(tmp_path.glob("a/*"))  # the first copy is not there yet
    release.set()
    writer.flush()
    assert not errors and len(list(tmp_path.glob("a/*"))) <= 2
    for number in reversed(range(20)):
        name, stored = a_row(number)
        assert reader.arrived(name)
        taken = reader.take(name)
        assert taken.keys() == stored.keys() and torch.equal(feature_codec.decode(taken), feature_codec.decode(stored))
    assert not list(tmp_path.glob("a/*"))


def test_the_writer_is_bounded_in_bytes_and_a_file_too(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "WAITING_BYTES", 64)
    monkeypatch.setattr(spool, "FILE_BYTES", 30)
    writer, release = SpoolWriter(tmp_path, print), threading.Event()
    for number in range(4):
        assert writer.has_room()
        writer.put("a", *a_row(number), release.wait)
        if number == 3:
            assert not writer.has_room()  # 4 rows of 18 bytes
    release.set()
    writer.flush()
    assert writer.has_room() and len(list(tmp_path.glob("a/*"))) >= 2


def test_unexpected_rows_are_deleted_and_a_row_expected_twice_is_kept_until_taken_twice(tmp_path):
    left = SpoolWriter(tmp_path, print)
    left.put("a", *a_row(7), lambda: None)
    left.flush()
    reader = SpoolReader(tmp_path, "a")  # of a command that is given again
    assert not list(tmp_path.glob("a/*"))
    (once, stored), (other, _) = a_row(1), a_row(2)
    assert reader.expect(once) and not reader.expect(once)
    for _ in range(2):  # asked for again, because an answer was lost
        left.put("a", once, stored, lambda: None)
        left.put("a", *a_row(2), lambda: None)
        left.flush()
    assert reader.arrived(once) and not reader.arrived(other)
    reader.take(once)
    assert reader.arrived(once)
    reader.take(once)
    assert not reader.arrived(once) and not list(tmp_path.glob("a/*"))


def test_a_full_disk_is_said_and_the_rows_are_missing(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    errors = list[str]()
    writer = SpoolWriter(tmp_path, errors.append)
    monkeypatch.setattr(spool, "write_tensors", full)
    writer.put("a", *a_row(1), lambda: None)
    writer.flush()
    assert "1 rows for a were not written" in errors[0] and "No space left" in errors[0]


@pytest.mark.parametrize("folder", ["../b", "", "a/b", 7, None, "x" * 65])
def test_a_folder_is_no_path(folder):
    assert not is_folder(folder)
