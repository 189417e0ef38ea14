"""Read an artefact's table: rows shard by shard, or whole columns that the processes of a machine share.

Parquet is compressed and cannot be mapped. The columns that a training reads of a large artefact are therefore written
once, uncompressed, to `.columns-KEY.arrow` beside the shards. The operating system shares its pages between the ranks
of a machine and drops them where memory is short. KEY hashes the manifest's digest, so a changed artefact gets a new
file and the old one is deleted. Ranks that start together each write the file, and the last rename wins.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.data.console import log_note
from draftsmith.data.store.files import CannotWrite, write_batches
from draftsmith.data.store.manifest import Manifest
from draftsmith.modules.types import InputError, whole_number

ARROW = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "list<bool>": pa.list_(pa.bool_()),
}
FORMAT = 1
# Bytes of Parquet from which on the columns are mapped.
MAPPED_BYTES = 2**24
# Bytes of Arrow in one chunk. Its lists stay far below the 2^31 items that one Arrow list array can hold.
CHUNK_BYTES = 2**24
# Temporary files that are older than this belong to killed processes.
LEFTOVER_S = 3600.0

IDS = ("input_ids", "prompt_ids", "draft_ids")
NEVER_EMPTY = ("input_ids", "prompt_ids")
PROBABILITIES = ("accept_prob", "overlap", "reached")


class Rows:
    """The table of an opened artefact by global row number, with one shard in memory at a time."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        limit: int = 0,
        vocab_size: int | None = None,
    ):
        """columns: to read; None reads all. limit: only the first so many rows; 0 takes all. vocab_size: of the model
        that reads the token ids, to check them."""
        files = [entry for entry in manifest.files if entry.name.endswith(".parquet")]
        self._directory, self._manifest, self._vocab_size = Path(directory), manifest, vocab_size
        self._paths, self._columns = [Path(directory) / entry.name for entry in files], columns
        self._ends = list(itertools.accumulate(entry.rows for entry in files))
        total = self._ends[-1] if files else 0
        self._num_rows = min(limit, total) if limit else total
        self._shard: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return self._num_rows

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return rows [start, stop) as dictionaries of Python values."""
        return list(self.iterate(start, stop))

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        row, stop = start, len(self) if stop is None else min(stop, len(self))
        while row < stop:
            index = bisect.bisect_right(self._ends, row)
            # Rows are mostly read in order, so the last shard is kept.
            if self._shard is None or self._shard[0] != index:
                self._shard = (index, self._read(index))
            table = self._shard[1]
            part = table.slice(table.num_rows - (self._ends[index] - row), stop - row)
            yield from part.to_pylist()
            row += part.num_rows

    def tables(self) -> Iterator[pa.Table]:
        """Yield the table of each shard."""
        return map(self._read, range(len(self._paths)))

    def _read(self, index: int) -> pa.Table:
        path = self._paths[index]
        remedy = "Delete it and run its stage again, which rebuilds just this shard."
        try:
            columns = None if self._columns is None else list(self._columns)
            table = pq.read_table(path, columns=columns, partitioning=None)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise InputError(str(path), f"unreadable ({error})", "a Parquet shard", remedy) from error

        # A shard may have been replaced by one with other rows or types.
        first = self._ends[index - 1] if index else 0
        if table.num_rows != self._ends[index] - first:
            raise InputError(str(path), f"{table.num_rows} rows", f"{self._ends[index] - first}, as recorded", remedy)
        types = {spec.name: ARROW[spec.dtype] for spec in self._manifest.fields if spec.dtype in ARROW}
        for column in table.schema:
            if column.type != types.get(column.name, column.type):
                found = f"{column.name} of {column.type}"
                raise InputError(str(path), found, f"{types[column.name]}, as recorded", remedy)
        check_values(table, self._directory, self._manifest, first, self._vocab_size)
        return table


class ListColumn:
    """A list column of which a row is a slice of Arrow's memory, not Python numbers."""

    def __init__(self, column: pa.ChunkedArray):
        # The chunks stay apart: in one chunk, Arrow's lists would end at 2^31 tokens.
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values, self._offsets = [chunk.values for chunk in chunks], [chunk.offsets for chunk in chunks]
        self._ends = list(itertools.accumulate(map(len, chunks)))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row's list, [N] int64."""
        parts = [np.diff(offsets.to_numpy()) for offsets in self._offsets]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = bisect.bisect_right(self._ends, row)
        offsets = self._offsets[chunk]
        at = row - (self._ends[chunk] - len(offsets) + 1)
        begin, end = offsets[at].as_py(), offsets[at + 1].as_py()
        return self._values[chunk].slice(begin, end - begin).to_numpy(zero_copy_only=False)

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (values, offsets) of some rows at a time: row i of them is values[offsets[i] : offsets[i + 1]]."""
        for values, bounds in zip(self._values, self._offsets, strict=True):
            offsets = bounds.to_numpy()
            chunk_values = values.slice(offsets[0], offsets[-1] - offsets[0])
            yield chunk_values.to_numpy(zero_copy_only=False), offsets - offsets[0]


def open_columns(directory: Path, manifest: Manifest, names: Sequence[str], vocab_size: int | None = None) -> pa.Table:
    """Return columns of all rows of an artefact, mapped from a file if it is large.

    The artefact must have been opened with `open_artefact`. A chunk is a shard or more: in one chunk, Arrow's lists
    would end at 2^31 items.
    """
    rows = Rows(directory, manifest, names, vocab_size=vocab_size)
    if sum(entry.bytes for entry in manifest.files if entry.name.endswith(".parquet")) < MAPPED_BYTES:
        return pa.concat_tables(rows.tables())

    # A changed artefact has another digest, and gets another file.
    key = hashlib.sha256(json.dumps([FORMAT, manifest.digest, *names]).encode()).hexdigest()[:16]
    path = Path(directory) / f".columns-{key}.arrow"
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException):
        try:
            _write_columns(path, rows)
        except CannotWrite as error:
            log_note(f"warning: {error} Every process holds the columns in its own memory.")
            return pa.concat_tables(rows.tables())
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    check_values(table, directory, manifest, 0, vocab_size)
    return table


def _write_columns(path: Path, rows: Rows) -> None:
    """Write the columns to an Arrow file, and delete files of the artefact's former content."""
    log_note(f"{path.parent}: writing its columns to a file that every process maps")
    for old in path.parent.glob(".columns-*"):
        # Another rank may be writing the same file, or have deleted an old one.
        with suppress(OSError):
            is_temporary = ".tmp-" in old.name
            if time.time() - old.stat().st_mtime > LEFTOVER_S if is_temporary else old != path:
                old.unlink(missing_ok=True)

    def chunks() -> Iterator[pa.RecordBatch]:
        # Small shards share a chunk, so that a row is found among few chunks.
        parts: list[pa.Table] = []
        for table in rows.tables():
            parts.append(table)
            if sum(part.nbytes for part in parts) >= CHUNK_BYTES:
                yield from pa.concat_tables(parts).combine_chunks().to_batches()
                parts = []
        if parts:
            yield from pa.concat_tables(parts).combine_chunks().to_batches()

    write_batches(path, chunks())
    # The tables are not needed any more: the file is mapped from here on.
    pa.default_memory_pool().release_unused()


class Fault(NamedTuple):
    """A wrong value in a row of a record batch."""

    column: str
    row: int
    found: str
    expected: str


def check_values(table: pa.Table, directory: Path, manifest: Manifest, first: int, vocab_size: int | None) -> None:
    """Check the list columns of a table: a hash proves that a file is unchanged, not that its values can be used.

    Token ids lie in the vocabulary, probabilities in [0, 1], no number is NaN, lists have the length that the
    manifest's fields give them, and rows with answers have at least one answer token.

    first: global number of the table's first row. vocab_size: of the model that reads them; None if it is not known.

    Raises:
        InputError: names the first fault and its row.
    """
    for batch in table.to_batches():
        if (fault := next(_faults(batch, manifest, vocab_size), None)) is not None:
            named = f" ({batch['id'][fault.row].as_py()})" if "id" in batch.schema.names else ""
            found = f"{fault.found} in row {first + fault.row}{named}"
            remedy = f"Make it again with another output: {manifest.command}"
            raise InputError(f"{directory}, {fault.column}", found, fault.expected, remedy)
        first += batch.num_rows


def _faults(batch: pa.RecordBatch, manifest: Manifest, vocab_size: int | None) -> Iterator[Fault]:
    lists = {name: batch[name] for name in batch.schema.names if pa.types.is_list(batch[name].type)}

    def wrong_value(name: str, wrong: np.ndarray, expected: str) -> Iterator[Fault]:
        for at in np.flatnonzero(wrong)[:1].tolist():
            row = int(np.searchsorted(_list_lengths(lists[name]).cumsum(), at, side="right"))
            yield Fault(name, row, str(lists[name].flatten()[at].as_py()), expected)

    # Nulls first: what follows reads the lists as NumPy arrays.
    for name, column in lists.items():
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[:1].tolist():
            yield Fault(name, row, "null", "a list")
        yield from wrong_value(name, column.flatten().is_null().to_numpy(zero_copy_only=False), "values")

    yield from _wrong_lengths(lists, manifest)

    # Values by the meaning of their column.
    below, vocabulary = np.inf, ""
    if vocab_size is not None:
        below, vocabulary = vocab_size, f" below {vocab_size}, the model's vocabulary"
    for name, column in lists.items():
        values = column.flatten().to_numpy(zero_copy_only=False)
        if name in IDS:
            yield from wrong_value(name, ~((values >= 0) & (values < below)), f"token ids{vocabulary}")
        elif name in PROBABILITIES:
            yield from wrong_value(name, ~((values >= 0) & (values <= 1)), "probabilities in [0, 1]")
        elif values.dtype.kind == "f":
            yield from wrong_value(name, np.isnan(values), "numbers")
    if "starts" in lists and "input_ids" in lists:
        starts = lists["starts"].flatten().to_numpy()
        ends = _list_lengths(lists["input_ids"]).repeat(_list_lengths(lists["starts"]))
        yield from wrong_value("starts", (starts < 1) | (starts > ends), "places in its row's input_ids")


def _wrong_lengths(lists: dict[str, pa.ListArray], manifest: Manifest) -> Iterator[Fault]:
    """Compare lists with the sizes of their row: T tokens, R of them in answers, S drafts of K tokens."""
    sizes: dict[str, np.ndarray] = {}
    if "input_ids" in lists:
        sizes["T"] = _list_lengths(lists["input_ids"])
    if "loss_mask" in lists:
        answered = lists["loss_mask"].flatten().to_numpy(zero_copy_only=False).astype(bool)
        # A running sum, read at the end of each row.
        totals = np.concatenate([[0], answered.cumsum()])
        sizes["R"] = np.diff(totals[_list_lengths(lists["loss_mask"]).cumsum()], prepend=0)
        for row in np.flatnonzero(sizes["R"] < 1)[:1].tolist():
            yield Fault("loss_mask", row, "no answer token", "at least one")
    if "starts" in lists:
        depth = manifest.config.get("depth")
        whole_number("manifest.json, config.depth", depth, 1, 2**16)
        sizes["S"] = _list_lengths(lists["starts"])
        sizes["S*K"] = sizes["S"] * depth

    # Lists whose symbolic length is not among these sizes are not compared.
    shapes = {spec.name: spec.shape[0] for spec in manifest.fields if spec.shape}
    for name, column in lists.items():
        lengths, symbol = _list_lengths(column), shapes.get(name, "")
        for row in np.flatnonzero(lengths != sizes.get(symbol, lengths))[:1].tolist():
            yield Fault(name, row, f"{lengths[row]} values", f"{sizes[symbol][row]}, by its other columns")
        for row in np.flatnonzero(lengths == 0)[:1].tolist() if name in NEVER_EMPTY else ():
            yield Fault(name, row, "no tokens", "at least one")


def _list_lengths(column: pa.ListArray) -> np.ndarray:
    return column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
