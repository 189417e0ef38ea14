"""Columns of a large artefact are mapped from a file that is made once, is of this artefact, and is whole."""

from __future__ import annotations

import gc
import json
import shutil
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data.store import columns
from draftsmith.data.store.columns import open_columns
from draftsmith.data.store.datasets import AcceptanceDataset
from draftsmith.data.store.files import CannotWrite
from draftsmith.data.store.manifest import MANIFEST, Manifest, file_sha256

NAMES = ["id", "input_ids", "loss_mask", "turn"]


@pytest.fixture
def directory(chain, tmp_path, monkeypatch):
    """An artefact that counts as large, of several shards, with a chunk for every two or so."""
    monkeypatch.setattr(columns, "MAPPED_BYTES", 0)
    monkeypatch.setattr(columns, "CHUNK_BYTES", 500)
    return shutil.copytree(chain.directory("acceptance"), tmp_path / "labels")


def made(directory):
    return sorted(directory.glob(".columns-*"))


def rows_of(directory):
    tables = (pq.read_table(path, columns=NAMES) for path in sorted(directory.glob("*.parquet")))
    return [row for table in tables for row in table.to_pylist()]


def opened(directory) -> pa.Table:
    return open_columns(directory, Manifest.read(directory), NAMES)


def rewritten(directory) -> None:
    """Its first token is another one, as if its stage had been run again on other prompts."""
    about = json.loads((directory / MANIFEST).read_text())
    entry = about["files"][0]
    table = pq.read_table(directory / entry["name"])
    place, ids = table.column_names.index("input_ids"), table["input_ids"].to_pylist()
    ids[0][0] += 1
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(ids, field.type)), directory / entry["name"])
    entry |= {"bytes": (directory / entry["name"]).stat().st_size, "sha256": file_sha256(directory / entry["name"])}
    (directory / MANIFEST).write_text(json.dumps(about))


def test_mapped_columns_are_those_of_the_shards_and_take_no_memory(directory):
    gc.collect()  # what other tests left may go while this one counts
    before = pa.total_allocated_bytes()
    table = opened(directory)
    assert table.to_pylist() == rows_of(directory) and table["input_ids"].num_chunks > 1
    assert [path.suffix for path in made(directory)] == [".arrow", ".json"]
    # Arrow counts what it allocates, and not what is mapped: a copy of the columns would be as large as they are.
    assert pa.total_allocated_bytes() - before < table.nbytes


def test_a_small_artefact_is_read(chain):
    table = opened(chain.directory("acceptance"))
    assert table.to_pylist() == rows_of(chain.directory("acceptance")) and not made(chain.directory("acceptance"))


def test_the_file_is_made_once(directory, monkeypatch):
    opened(directory)
    monkeypatch.setattr(columns, "_make", None)
    assert opened(directory).to_pylist() == rows_of(directory)


def test_an_artefact_that_has_changed_has_another_file(directory):
    opened(directory)
    before = made(directory)
    rewritten(directory)
    assert opened(directory).to_pylist() == rows_of(directory)
    assert len(made(directory)) == 2 and not set(made(directory)) & set(before)


@pytest.mark.parametrize("damage", ["cut", "altered", "no record", "a record that is none"])
def test_a_file_that_is_not_as_it_was_written_is_made_again(directory, damage):
    opened(directory)
    path, record = made(directory)
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "altered":
        path.write_bytes(content[:600] + bytes([content[600] ^ 1]) + content[601:])
    elif damage == "no record":
        path.write_bytes(content[:100])  # killed while it was written, were it written in its place
        record.unlink()
    else:
        record.write_text("{")
    assert opened(directory).to_pylist() == rows_of(directory)
    assert path.read_bytes() == content


def test_a_directory_that_takes_no_file_is_read_by_each_process(directory, monkeypatch, capfd):
    def refused(path, batches):
        raise CannotWrite(str(path), "Read-only file system", "a place that can be written", "Choose another.")

    monkeypatch.setattr(columns, "write_batches", refused)
    assert opened(directory).to_pylist() == rows_of(directory) and not made(directory)
    assert "Every process holds the columns" in "".join(capfd.readouterr())


def open_in_turn(directory, barrier, results):
    columns.MAPPED_BYTES, columns.CHUNK_BYTES = 0, 500
    barrier.wait()
    results.put(opened(directory).to_pylist())


def test_processes_that_come_at_once_all_have_it(directory):
    context = get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=open_in_turn, args=(directory, barrier, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found == [rows_of(directory)] * 4 and len(made(directory)) == 2
    assert opened(directory).to_pylist() == rows_of(directory)


def test_samples_of_mapped_columns_are_those_of_columns_in_memory(directory, monkeypatch):
    mapped = AcceptanceDataset(directory, mix=0.5)
    monkeypatch.setattr(columns, "MAPPED_BYTES", 2**24)
    monkeypatch.setattr(columns, "_mapped", None)
    read = AcceptanceDataset(directory, mix=0.5)
    for row in range(len(read)):
        ours, theirs = mapped.item(row, 1), read.item(row, 1)
        assert all(ours[name].equal(theirs[name]) for name in theirs) and mapped.name(row) == read.name(row)
    assert np.array_equal(mapped.answer_lengths([0, 3]), read.answer_lengths([0, 3]))
    assert np.array_equal(mapped.lengths, read.lengths)
