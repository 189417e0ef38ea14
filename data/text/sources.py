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
NO_FILTER = "none"  # what users write for no split


class RowSource(ABC):
    """Rows by number. name: of the file or data set. digest: identifies the content. split_taken: the rows are one
    split already, there is nothing to filter."""

    split_taken = False

    def __init__(self, name: str | Path, digest: str):
        self.name, self.digest = name, digest

    @cached_property
    def columns(self) -> list[str]:
        """The columns of all rows that can be read, in the order in which they appear."""
        return list(dict.fromkeys(name for _, row in first_rows(self) for name in row))

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """Raises RowError where the row cannot be read."""

    def where(self, index: int) -> str:
        """The row as an error names it: its file and place there."""
        return f"{self.name}, row {index}"


def open_source(
    path: str, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> RowSource:
    """split, subset, revision: of a `datasets` source; a file's rows are filtered by their own `split` column.

    Raises:
        InputError: nothing there, another kind of file, an empty one, or a split that has to be named.
    """
    resolved = resolve_model(path) if path.startswith(EMBEDDED) else path
    file = Path(resolved)
    if file.is_file():
        opener = OPENERS.get(suffix_of(file))
        if opener is None:
            expected = "a .jsonl, .json or .parquet file, a directory or a hub id of `datasets`"
            raise InputError("source", path, expected, "Convert the file.")
        try:
            source = opener(file)
        except OSError as error:
            raise _unreadable(file, error) from error
        if not len(source):
            raise InputError("source", f"{path}, which is empty", "at least one row", "Check the file.")
        return source
    if suffix_of(file) in OPENERS or (not file.is_dir() and resolved.count("/") > 1):
        found = f"{path}, which does not exist"
        raise InputError("source", found, "a file, a directory or a hub id", "Check the path.")
    if (file / MANIFEST).exists():
        remedy = "Pass the data that it was made from."
        raise InputError("source", f"{path}, an artefact of this program", "chats as they were written", remedy)
    return _open_datasets(path, file, named_split(split), subset, revision)


def named_split(split: str | None) -> str | None:
    """The split that was asked for; None where it is `none` (or empty): rows of all splits."""
    return None if split is None or split.strip().lower() in ("", NO_FILTER) else split


def suffix_of(file: Path) -> str:
    """`.jsonl` of rows.jsonl and of rows.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSED and suffixes[-2] != ".parquet":
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def plain_stem(file: Path) -> str:
    """`rows` of rows.jsonl and of rows.jsonl.gz."""
    return Path(file.stem).stem if file.suffix.lower() in COMPRESSED else file.stem


def first_rows(source: RowSource) -> Iterator[tuple[int, Row]]:
    """(number, row) of those that can be read, in order."""
    for index in range(len(source)):
        try:
            yield index, source.row(index)
        except RowError:
            continue


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(str(path), f"unreadable ({error})", "a whole file", "Check it, or fetch it again.")


class JsonLines(RowSource):
    """One JSON object a line; blank lines are none. Only the lines' offsets are kept in memory; a compressed file is
    written out into a temporary one."""

    def __init__(self, path: Path):
        super().__init__(path, file_sha256(path))
        self._file = _decompressed(path)
        self._offsets: list[tuple[int, int]] = []  # (byte offset, line number from 1)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            start = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line[start:].strip():
                self._offsets.append((offset + start, number))
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Row:
        self._file.seek(self._offsets[index][0])
        return _object(read_json_text(self._file.readline()))

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._offsets[index][1]}"


def _decompressed(path: Path) -> IO[bytes]:
    """The file, or what is in it where it is compressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    import pyarrow as pa

    whole = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as rows are read
    try:
        with pa.input_stream(str(path), compression=codec) as compressed:
            shutil.copyfileobj(compressed, whole)
    except (pa.ArrowException, OSError) as error:  # another kind of file, a truncated one, no room
        whole.close()
        raise _unreadable(path, error) from error
    whole.seek(0)
    return whole


def read_json_text(text: bytes) -> Any:
    """A JSON value, by the standard: UTF-8, and no NaN or Infinity.

    Raises:
        RowError: it is something else, or nested too deeply to be read.
    """
    try:
        return json.loads(text.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise RowError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"not JSON ({error})") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise RowError(f"a JSON {type(value).__name__}, not an object")
    return value


class JsonList(RowSource):
    """A JSON file that holds one list of objects."""

    def __init__(self, rows: Sequence[Any], digest: str, path: Path):
        super().__init__(path, digest)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _object(self._rows[index])


def _open_json(path: Path) -> RowSource:
    with _decompressed(path) as file:
        raw = file.read().removeprefix(BOM)
    if not raw.strip():
        return JsonList([], "", path)
    try:
        rows = read_json_text(raw)
    except RowError as error:
        if _opens_lines(raw):
            return JsonLines(path)
        raise InputError(str(path), error, "a list of objects", "Check the file.") from error
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise InputError(str(path), type(rows).__name__, "a list of objects", "Check the file.")
    return JsonList(rows, hashlib.sha256(raw).hexdigest(), path)


def _opens_lines(raw: bytes) -> bool:
    """JSON lines under the name .json, as many data sets are: the first line is an object of its own."""
    try:
        return isinstance(read_json_text(raw.lstrip().split(b"\n", 1)[0]), dict)
    except RowError:
        return False


class ParquetTable(RowSource):
    """A Parquet file, memory-mapped."""

    def __init__(self, path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path, memory_map=True, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise InputError(str(path), f"unreadable ({error})", "a Parquet file", "Check the file.") from error
        super().__init__(path, file_sha256(path))
        self.columns = self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Row:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date that Python has not
            raise RowError(f"unreadable ({error})") from error


OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _open_json,
    ".parquet": ParquetTable,
}


class DatasetRows(RowSource):
    """A `datasets.Dataset`."""

    split_taken = True

    def __init__(self, dataset: Any, choice: str, name: str):
        """choice: which of the data set's rows these are."""
        # The fingerprint covers a hub data set's files and revision; the Arrow files stay in the cache.
        super().__init__(name, hashlib.sha256(f"{choice} {dataset._fingerprint}".encode()).hexdigest())
        self._dataset, self.columns = dataset, dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        try:
            return self._dataset[index]
        except Exception as error:  # whatever decodes a column: pictures, sound, text
            raise RowError(f"unreadable ({type(error).__name__}: {error})") from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _open_datasets(name: str, path: Path, split: str | None, subset: str | None, revision: str | None) -> RowSource:
    import datasets

    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), subset, revision=revision)
    except Exception as error:  # datasets and the hub client raise many kinds: no such id, no network, no access
        why = "; ".join(_first_line(cause) for cause in (error, error.__cause__) if cause is not None)
        found = f"{name} ({why})"
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
    return DatasetRows(loaded, f"{name} {subset} {revision} {split}", name)
