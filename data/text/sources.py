"""Rows of a JSONL, JSON or Parquet file, or of a `datasets` directory or hub id, by number.

JSON files are UTF-8, with or without a byte-order mark, and may be compressed (.gz, .zst).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NoReturn

from draftsmith.data.models.hub import EMBEDDED, resolve_model
from draftsmith.data.store.manifest import MANIFEST, file_sha256
from draftsmith.data.text.template import RowError
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]
BOM = b"\xef\xbb\xbf"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
# The value of --split that turns its filter off.
NO_FILTER = "none"
A_SOURCE = "a .jsonl, .json or .parquet file, a directory or a hub id of `datasets`"


class RowSource(ABC):
    """Rows by number.

    name: of the file or data set. digest: identifies the content. split_taken: the rows are one split already.
    """

    split_taken = False

    def __init__(self, name: str | Path, digest: str):
        self.name, self.digest = name, digest

    @cached_property
    def columns(self) -> list[str]:
        """Columns of all readable rows, in the order of their appearance."""
        return list(dict.fromkeys(name for _, row in readable_rows(self) for name in row))

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """Return a row; raise RowError if it cannot be read."""

    def where(self, index: int) -> str:
        """Return the row's file and place, for errors."""
        return f"{self.name}, row {index}"


class JsonLines(RowSource):
    """One JSON object per line; blank lines are skipped.

    Only the offsets of lines are in memory. A compressed file is unpacked to a temporary one.
    """

    def __init__(self, path: Path):
        super().__init__(path, file_sha256(path))
        self._file = _unpacked(path)
        self._places: list[tuple[int, int]] = []  # byte offset, line number from 1
        offset = 0
        for number, line in enumerate(self._file, start=1):
            start = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line[start:].strip():
                self._places.append((offset + start, number))
            offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> Row:
        self._file.seek(self._places[index][0])
        return _as_row(parse_json(self._file.readline()))

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._places[index][1]}"


class JsonList(RowSource):
    """A JSON file that holds one list of objects."""

    def __init__(self, rows: Sequence[Any], digest: str, path: Path):
        super().__init__(path, digest)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _as_row(self._rows[index])


class ParquetTable(RowSource):
    """A Parquet file, memory-mapped."""

    def __init__(self, path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path, memory_map=True, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error
        super().__init__(path, file_sha256(path))
        self.columns = self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Row:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date outside of Python's range
            raise RowError(f"unreadable ({error})") from error


class DatasetRows(RowSource):
    """A `datasets.Dataset`. choice: which split, subset and revision it is."""

    split_taken = True

    def __init__(self, dataset: Any, choice: str, name: str):
        # The fingerprint covers a hub data set's files and revision; the Arrow files stay in the cache.
        super().__init__(name, hashlib.sha256(f"{choice} {dataset._fingerprint}".encode()).hexdigest())
        self._dataset, self.columns = dataset, dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        try:
            return self._dataset[index]
        except Exception as error:  # decoders of pictures, sound and text raise many kinds
            raise RowError(f"unreadable ({type(error).__name__}: {error})") from error


def open_source(
    path: str, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> RowSource:
    """Open a file or data set of prompts.

    split, subset, revision: of a `datasets` source; rows of a file are filtered by their own column `split`.

    Raises:
        InputError: nothing there, another kind of file, an empty one, or a split that must be named.
    """
    resolved = resolve_model(path) if path.startswith(EMBEDDED) else path
    file = Path(resolved)
    if file.is_file():
        opener = OPENERS.get(suffix_of(file))
        if opener is None:
            raise InputError("source", path, A_SOURCE, "Convert the file.")
        try:
            source = opener(file)
        except OSError as error:
            raise _unreadable(file, error) from error
    elif suffix_of(file) in OPENERS or (not file.is_dir() and resolved.count("/") > 1):
        raise InputError("source", f"{path}, which does not exist", A_SOURCE, "Check the path.")
    elif (file / MANIFEST).exists():
        remedy = "Pass the data that it was made from."
        raise InputError("source", f"{path}, an artefact of this program", "chats as they were written", remedy)
    else:
        source = _open_datasets(path, file, named_split(split), subset, revision)
    if not len(source):
        raise InputError("source", f"{path}, which is empty", "at least one row", "Check the data.")
    return source


def named_split(split: str | None) -> str | None:
    """Return the split to keep; None for `none` or an empty name, which keep all rows."""
    return None if split is None or split.strip().lower() in ("", NO_FILTER) else split


def suffix_of(file: Path) -> str:
    """Return `.jsonl` of rows.jsonl and of rows.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSED and suffixes[-2] != ".parquet":
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def plain_stem(file: Path) -> str:
    """Return `rows` of rows.jsonl and of rows.jsonl.gz."""
    return Path(file.stem).stem if file.suffix.lower() in COMPRESSED else file.stem


def readable_rows(source: RowSource) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of the rows that can be read."""
    for index in range(len(source)):
        try:
            yield index, source.row(index)
        except RowError:
            continue


def parse_json(text: bytes) -> Any:
    """Parse JSON by the standard: UTF-8, without NaN or Infinity.

    Raises:
        RowError: it is something else, or nested too deeply.
    """

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(text.decode(), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise RowError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"not JSON ({error})") from error


def _as_row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise RowError(f"a JSON {type(value).__name__}, not an object")
    return value


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(str(path), f"unreadable ({error})", "a whole file", "Check it, or fetch it again.")


def _unpacked(path: Path) -> IO[bytes]:
    """Open a file, or its unpacked content if it is compressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    import pyarrow as pa

    content = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as rows are read
    try:
        with pa.input_stream(str(path), compression=codec) as compressed:
            shutil.copyfileobj(compressed, content)
    except (pa.ArrowException, OSError) as error:  # another kind of file, a truncated one, no room
        content.close()
        raise _unreadable(path, error) from error
    content.seek(0)
    return content


def _open_json(path: Path) -> RowSource:
    """Open a .json file: a list of objects, an object that holds one such list, or JSON lines under this name."""
    with _unpacked(path) as file:
        raw = file.read().removeprefix(BOM)
    if not raw.strip():
        return JsonList([], "", path)
    try:
        rows = parse_json(raw)
    except RowError as error:
        try:
            is_lines = isinstance(parse_json(raw.lstrip().split(b"\n", 1)[0]), dict)
        except RowError:
            is_lines = False
        if is_lines:
            return JsonLines(path)
        raise InputError(str(path), error, "a list of objects", "Check the file.") from error
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise InputError(str(path), type(rows).__name__, "a list of objects", "Check the file.")
    return JsonList(rows, hashlib.sha256(raw).hexdigest(), path)


OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _open_json,
    ".parquet": ParquetTable,
}


def _open_datasets(name: str, path: Path, split: str | None, subset: str | None, revision: str | None) -> RowSource:
    import datasets

    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), subset, revision=revision)
    except Exception as error:  # datasets and the hub client raise many kinds: no such id, no network, no access
        causes = [cause for cause in (error, error.__cause__) if cause is not None]
        reasons = [f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}" for e in causes]
        raise InputError("source", f"{name} ({'; '.join(reasons)})", A_SOURCE, "Check it, or log in.") from error
    if isinstance(loaded, datasets.DatasetDict):
        names = list(loaded)
        chosen = split or (names[0] if len(names) == 1 else None)
        if chosen not in names:
            raise InputError("split", split, f"one of {', '.join(names)}", "Pass --split NAME.")
        loaded = loaded[chosen]
    return DatasetRows(loaded, f"{name} {subset} {revision} {split}", name)
