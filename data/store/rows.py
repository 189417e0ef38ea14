"""An artifact's table: rows shard by shard, or all of it as Arrow columns."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules.types import InputError

ARROW = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "list<bool>": pa.list_(pa.bool_()),
}
IDS = ("input_ids", "prompt_ids", "draft_ids")
REMEDY = "Delete it and run its stage again, which rebuilds just this shard."


class Rows:
    """The table of an opened artifact by global row number, with one shard in memory at a time."""

    def __init__(
        self, manifest: Manifest, columns: Sequence[str] | None = None, limit: int = 0, vocab_size: int | None = None
    ):
        """columns: to read; None reads all. limit: only the first so many rows; 0 takes all. vocab_size: of the model
        that reads the token ids, to check them."""
        files = [entry for entry in manifest.files if entry.name.endswith(".parquet")]
        if not files:
            raise InputError(str(manifest.directory / MANIFEST), "no tables", "at least one", "Run its stage again.")
        self._paths, self._columns = [manifest.directory / entry.name for entry in files], columns
        self._vocab_size = vocab_size
        for path, entry in zip(self._paths, files, strict=True):
            if (num_rows := _reading(path, pq.read_metadata).num_rows) != entry.rows:
                raise InputError(str(path), f"{num_rows:,} rows", f"{entry.rows:,}, as its manifest says", REMEDY)
        self._ends = list(itertools.accumulate(entry.rows for entry in files))
        self._num_rows = min(limit, self._ends[-1]) if limit else self._ends[-1]
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
                self._shard = (index, self._read(self._paths[index]))
            table = self._shard[1]
            part = table.slice(table.num_rows - (self._ends[index] - row), stop - row)
            yield from part.to_pylist()
            row += part.num_rows

    def table(self) -> pa.Table:
        """Return all rows. A chunk is a shard: in one chunk, Arrow's lists would end at 2^31 items."""
        return pa.concat_tables(map(self._read, self._paths))

    def _read(self, path: Path) -> pa.Table:
        columns = None if self._columns is None else list(self._columns)
        table = _reading(path, pq.read_table, columns=columns, partitioning=None)

        # A tokenizer may have more tokens than the model has embeddings; a GPU reports such an id as an assertion.
        for name in IDS if self._vocab_size is not None else ():
            if name in table.column_names:
                largest = pc.max(pc.list_flatten(table[name])).as_py()
                if largest is not None and largest >= self._vocab_size:
                    expected = f"token ids below {self._vocab_size}, the model's vocabulary"
                    raise InputError(f"{path}, {name}", largest, expected, "Use the model that they were made for.")
        return table


def _reading(path: Path, read: Callable[..., Any], **options: Any) -> Any:
    """Return what a function of pyarrow reads of a shard."""
    try:
        return read(path, **options)
    except (pa.ArrowException, OSError) as error:
        raise InputError(str(path), f"unreadable ({error})", "a Parquet shard", REMEDY) from error
