"""Reading rows and columns: large artefacts are mapped from a file, and wrong values are named with their row."""

from __future__ import annotations

import gc
import json
import math
import shutil
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data.acceptance import MIXED_FIELDS, ROLLOUT_FIELDS
from draftsmith.data.responses import FIELDS as RESPONSE_FIELDS
from draftsmith.data.store import rows
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.files import CannotWrite
from draftsmith.data.store.manifest import MANIFEST, Manifest, file_sha256
from draftsmith.data.store.rows import ARROW, ListColumn, Rows, check_values, open_columns
from draftsmith.modules.types import InputError

NAMES = ["id", "input_ids", "loss_mask", "turn"]


def test_rows_are_found_across_shards(chain):
    table = Rows(chain.directory("prompts"), Manifest.read(chain.directory("prompts")), ["id"])
    assert [row["id"] for row in table.read(2, 8)] == [f"row-{i}" for i in range(2, 8)]
    assert len(table) == 11 and len(table.read(9, 99)) == 2


@pytest.fixture
def directory(chain, tmp_path, monkeypatch):
    """An artefact of several shards that counts as large, with about two shards in a chunk."""
    monkeypatch.setattr(rows, "MAPPED_BYTES", 0)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 500)
    return shutil.copytree(chain.directory("acceptance"), tmp_path / "labels")


def column_files(directory):
    return sorted(directory.glob(".columns-*"))


def expected_rows(directory):
    tables = (pq.read_table(path, columns=NAMES) for path in sorted(directory.glob("*.parquet")))
    return [row for table in tables for row in table.to_pylist()]


def columns_of(directory) -> pa.Table:
    return open_columns(directory, Manifest.read(directory), NAMES)


def test_mapped_columns_equal_the_shards_and_take_no_memory(directory, monkeypatch):
    gc.collect()  # garbage of other tests must not be freed while this one counts
    before = pa.total_allocated_bytes()
    table = columns_of(directory)
    assert table.to_pylist() == expected_rows(directory) and table["input_ids"].num_chunks > 1
    assert [path.suffix for path in column_files(directory)] == [".arrow"]
    # Arrow counts what it allocates, but not what it maps: a copy would be as large as the columns.
    assert pa.total_allocated_bytes() - before < table.nbytes
    monkeypatch.setattr(rows, "_write_columns", None)  # a second time the file is there
    assert columns_of(directory).to_pylist() == expected_rows(directory)


def test_columns_of_a_small_artefact_are_read_without_a_file(chain):
    directory = chain.directory("acceptance")
    assert columns_of(directory).to_pylist() == expected_rows(directory) and not column_files(directory)


def test_a_changed_artefact_gets_a_new_file(directory):
    columns_of(directory)
    before = column_files(directory)
    raw = json.loads((directory / MANIFEST).read_text())
    entry = raw["files"][0]
    table = pq.read_table(directory / entry["name"])
    index, ids = table.column_names.index("input_ids"), table["input_ids"].to_pylist()
    ids[0][0] += 1
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array(ids, field.type)), directory / entry["name"])
    entry |= {"bytes": (directory / entry["name"]).stat().st_size, "sha256": file_sha256(directory / entry["name"])}
    (directory / MANIFEST).write_text(json.dumps(raw))
    assert columns_of(directory).to_pylist() == expected_rows(directory)
    assert len(column_files(directory)) == 1 and not set(column_files(directory)) & set(before)


def test_a_truncated_column_file_is_written_again(directory):
    columns_of(directory)
    (path,) = column_files(directory)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert columns_of(directory).to_pylist() == expected_rows(directory)
    assert path.read_bytes() == content


def test_columns_are_read_into_memory_if_no_file_can_be_written(directory, monkeypatch, capfd):
    def refused(path, batches):
        raise CannotWrite(str(path), "Read-only file system", "a place that can be written", "Choose another.")

    monkeypatch.setattr(rows, "write_batches", refused)
    assert columns_of(directory).to_pylist() == expected_rows(directory) and not column_files(directory)
    assert "Every process holds the columns" in "".join(capfd.readouterr())


def open_in_turn(directory, barrier, results):
    rows.MAPPED_BYTES, rows.CHUNK_BYTES = 0, 500
    barrier.wait()
    results.put(columns_of(directory).to_pylist())


def test_processes_that_start_together_all_get_the_columns(directory):
    context = get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=open_in_turn, args=(directory, barrier, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    tables = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert tables == [expected_rows(directory)] * 4 and len(column_files(directory)) == 1


def test_samples_of_mapped_columns_equal_samples_of_columns_in_memory(directory, monkeypatch):
    mapped = open_dataset(directory, mix=0.5)
    monkeypatch.setattr(rows, "MAPPED_BYTES", 2**24)
    read = open_dataset(directory, mix=0.5)
    for row in range(len(read)):
        ours, theirs = mapped.item(row, 1), read.item(row, 1)
        assert all(ours[name].equal(theirs[name]) for name in theirs) and mapped.name(row) == read.name(row)
    assert np.array_equal(mapped.answer_lengths([0, 3]), read.answer_lengths([0, 3]))
    assert np.array_equal(mapped.lengths, read.lengths)


def test_a_column_may_hold_more_than_two_billion_tokens(tmp_path):
    """Arrow's lists count in 32 bits, so one chunk would overflow. The values lie in a sparse file."""
    long, last = 2**30, [3, 1, 4, 1, 5]
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(4 * long)
        file.write(np.array(last, dtype=np.int32).tobytes())
    items = pa.memory_map(str(tmp_path / "sparse")).read_buffer()
    values = pa.Array.from_buffers(pa.int32(), long + len(last), [None, items])
    chunk = pa.ListArray.from_arrays(pa.array([0, long, long + len(last)], pa.int32()), values)
    column = pa.chunked_array([chunk, chunk, chunk])
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        column.combine_chunks()
    lists = ListColumn(column)
    assert lists.lengths.dtype == np.int64 and lists.lengths.tolist() == [long, 5] * 3
    assert [lists[row].tolist() for row in (1, 3, 5)] == [last] * 3 and len(lists[4]) == long


def test_a_list_column_reads_chunks_and_slices():
    values = [[1, 2], [], [3], [4, 5, 6], [7]]
    sliced = pa.array([[9], *values[3:], [8]], pa.list_(pa.int32())).slice(1, 2)
    lists = ListColumn(pa.chunked_array([pa.array(values[:3], pa.list_(pa.int32())), sliced]))
    assert [lists[i].tolist() for i in range(5)] == values
    assert lists.lengths.tolist() == [2, 0, 1, 3, 1]
    assert [(flat.tolist(), offsets.tolist()) for flat, offsets in lists.parts()] == [
        ([1, 2, 3], [0, 2, 2, 3]), ([4, 5, 6, 7], [0, 3, 4])
    ]  # fmt: skip


V, DEPTH = 60, 2
TEXT = {"id": ["a", "b"], "input_ids": [[1, 2, 59], [4, 5]], "loss_mask": [[False, True, True], [False, True]]}
MIXED = TEXT | {name: [[0.5, 1.0], [0.0]] for name in ("accept_prob", "overlap", "log_q", "log_p")}
MIXED["draft_ids"] = [[0, 59], [3]]
MIXED["log_p"] = [[-math.inf, 0.0], [-1.0]]  # of a token that the target gives probability 0
DRAFTS = TEXT | {"starts": [[2, 3], [2]], "temperature": [[0.0, 1.0], [1.0]]}
DRAFTS |= {name: [[0.5] * 4, [0.5] * 2] for name in ("accept_prob", "overlap", "reached", "log_q")}
DRAFTS["draft_ids"] = [[1] * 4, [2] * 2]
FIELDS = {"responses": RESPONSE_FIELDS, "acceptance": MIXED_FIELDS, "rollouts": ROLLOUT_FIELDS}
GOOD = {"responses": TEXT, "acceptance": MIXED, "rollouts": DRAFTS}


def check(kind: str, columns: dict, vocab_size: int | None = V) -> None:
    types = {spec.name: ARROW[spec.dtype] for spec in FIELDS[kind]}
    table = pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
    # Two batches, the second of which is a slice: rows are counted over both.
    table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    manifest = Manifest(kind, {"depth": DEPTH}, fields=FIELDS[kind], command="draftsmith data again")
    check_values(table, Path("made"), manifest, 100, vocab_size)


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_pass_with_and_without_a_vocabulary(kind):
    check(kind, GOOD[kind])
    check(kind, GOOD[kind], None)


@pytest.mark.parametrize(
    ("kind", "column", "values", "says"),
    [
        ("responses", "input_ids", [1, 60], "input_ids: found 60 in row 101 .b., expected token ids below 60"),
        ("responses", "input_ids", [1, -1], "found -1"),
        ("responses", "input_ids", [], "found no tokens|expected 0"),
        ("responses", "input_ids", [1, None], "found None"),
        ("responses", "input_ids", None, "found null"),
        ("responses", "loss_mask", [True], "loss_mask: found 1 values in row 101 .b., expected 2"),
        ("responses", "loss_mask", [False, False], "no answer token"),
        ("acceptance", "draft_ids", [1, 2], "draft_ids: found 2 values in row 101 .b., expected 1"),
        ("acceptance", "accept_prob", [1.7], "accept_prob: found 1.7.* in row 101 .b., expected probabilities"),
        ("acceptance", "overlap", [-0.1], "overlap: found -0.1"),
        ("acceptance", "log_q", [math.nan], "log_q: found nan"),
        ("rollouts", "reached", [0.5, math.inf], "reached: found inf"),
        ("rollouts", "accept_prob", [0.5] * 3, "found 3 values in row 101 .b., expected 2"),
        ("rollouts", "starts", [3], "starts: found 3 in row 101 .b., expected places"),
        ("rollouts", "starts", [0], "starts: found 0"),
        ("rollouts", "temperature", [1.0, 1.0], "temperature: found 2 values"),
    ],
)
def test_a_wrong_value_is_named_with_its_row(kind, column, values, says):
    columns = {**GOOD[kind], column: [GOOD[kind][column][0], values]}
    with pytest.raises(InputError, match=says) as error:
        check(kind, columns)
    assert "draftsmith data again" in str(error.value) and "\n" not in str(error.value)
