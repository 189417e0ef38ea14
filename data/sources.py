"""Rows of a JSONL, JSON or Parquet file, or of a `datasets` directory or hub id, by number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftsmith.data.manifest import file_sha256
from draftsmith.data.models import EMBEDDED, resolve_model
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]


class Source(Protocol):
    """`digest` identifies the content. `split_taken`: the rows are one split already, there is nothing to filter."""

    columns: list[str]
    digest: str
    split_taken: bool

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Raises InputError where the row can not be read."""


def open_source(path: str, split: str | None = None, subset: str | None = None, revision: str | None = None) -> Source:
    """split, subset, revision: of a `datasets` source; a file's rows are filtered by their own `split` column.

    Raises:
        InputError: nothing there, another kind of file, an empty one, or a split that has to be named.
    """
    resolved = resolve_model(path) if path.startswith(EMBEDDED) else path
    file = Path(resolved)
    if file.is_file():
        opener = OPENERS.get(file.suffix)
        if opener is None:
            expected = "a .jsonl, .json or .parquet file, a directory or a hub id of `datasets`"
            raise InputError("source", path, expected, "Convert the file.")
        source = opener(file)
        if not len(source):
            raise InputError("source", f"{path}, which is empty", "at least one row", "Check the file.")
        return source
    if file.suffix in OPENERS or (not file.is_dir() and resolved.count("/") > 1):
        found = f"{path}, which does not exist"
        raise InputError("source", found, "a file, a directory or a hub id", "Check the path.")
    return _open_datasets(path, file, split, subset, revision)


class JsonLines:
    """One JSON object a line. Only the lines' offsets are kept in memory."""

    split_taken = False

    def __init__(self, path: Path):
        self._path, self.digest = path, file_sha256(path)
        self._offsets: list[tuple[int, int]] = []  # (byte offset, line number from 1)
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append((offset, number))
                offset += len(line)
        self._file = path.open("rb")
        self.columns = list(self.row(0)) if self._offsets else []

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Row:
        offset, number = self._offsets[index]
        self._file.seek(offset)
        return _object(self._file.readline(), f"{self._path}, line {number}")


class JsonList:
    """A JSON file that holds one list of objects."""

    split_taken = False

    def __init__(self, rows: Sequence[Any], digest: str, path: Path):
        self._rows, self._path, self.digest = rows, path, digest
        self.columns = list(self.row(0)) if rows else []

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _checked(self._rows[index], f"{self._path}, row {index}")


def _open_json(path: Path) -> Source:
    text = path.read_text("utf-8")
    try:
        rows = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{"):  # JSON lines under the name .json, as many data sets are
            return JsonLines(path)
        raise InputError(str(path), f"not JSON ({error})", "a list of objects", "Check the file.") from error
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise InputError(str(path), type(rows).__name__, "a list of objects", "Check the file.")
    return JsonList(rows, hashlib.sha256(text.encode()).hexdigest(), path)


def _object(line: bytes, where: str) -> Row:
    try:
        return _checked(json.loads(line), where)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(where, f"not JSON ({error})", "one object a line", "Correct the file.") from error


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(where, type(row).__name__, "an object", "Correct the file.")
    return row


class ParquetTable:
    """A Parquet file, memory-mapped."""

    split_taken = False

    def __init__(self, path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path, memory_map=True, partitioning=None)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(str(path), f"unreadable ({error})", "a Parquet file", "Check the file.") from error
        self.columns, self.digest = self._table.column_names, file_sha256(path)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]


OPENERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _open_json,
    ".parquet": ParquetTable,
}


class DatasetRows:
    """A `datasets.Dataset`."""

    split_taken = True

    def __init__(self, dataset: Any, name: str):
        self._dataset, self.columns = dataset, dataset.column_names
        # The fingerprint covers a hub data set's files and revision; the Arrow files stay in the cache.
        self.digest = hashlib.sha256(f"{name} {dataset._fingerprint}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        return self._dataset[index]


def _open_datasets(name: str, path: Path, split: str | None, subset: str | None, revision: str | None) -> Source:
    import datasets

    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), subset, revision=revision)
    except Exception as error:  # datasets and the hub client raise many kinds: no such id, no network, no access
        found = f"{name} ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"
        expected = "a file, a directory or a hub id of `datasets`"
        raise InputError("source", found, expected, "Check it, or log in.") from error
    if isinstance(loaded, datasets.DatasetDict):
        names = list(loaded)
        chosen = split or (names[0] if len(names) == 1 else None)
        if chosen not in names:
            raise InputError("split", split, f"one of {', '.join(names)}", "Pass --split NAME.")
        loaded = loaded[chosen]
    if not len(loaded):
        raise InputError("source", f"{name}, which is empty", "at least one row", "Check the data set.")
    return DatasetRows(loaded, f"{name} {subset} {revision} {split}")
