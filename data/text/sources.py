"""Rows of a JSONL, JSON or Parquet file, or of a `datasets` directory or hub id, by number.

JSON files are UTF-8, with or without a byte-order mark.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.console import log_note
from draftsmith.data.store.manifest import MANIFEST
from draftsmith.data.text.template import RowError
from draftsmith.modules.pretrained.hub import EMBEDDED, looks_local, resolve_model
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]
BOM = b"\xef\xbb\xbf"
# The value of --split that turns its filter off.
NO_FILTER = "none"
A_SOURCE = "a .jsonl, .json or .parquet file, a directory or a hub id of `datasets`"


@dataclass
class RowSource:
    """Rows of a file or data set, by number.

    name: of the file or data set. digest: identifies the content. read: returns a row, or raises RowError.
    line_numbers: of each row in its file, from 1, if rows are lines. split_taken: the rows are one split already.
    content_ids: ids are hashes of the content, so that equal ones are duplicates in any source.
    """

    name: str | Path
    digest: str
    num_rows: int
    read: Callable[[int], Any]
    line_numbers: Sequence[int] | None = None
    split_taken: bool = False
    content_ids: bool = False

    def __len__(self) -> int:
        return self.num_rows

    def row(self, index: int) -> Row:
        """Return a row; raise RowError if it cannot be read or is no object."""
        value = self.read(index)
        if not isinstance(value, dict):
            raise RowError(f"a JSON {type(value).__name__}, not an object")
        return value

    def prefix(self, index: int) -> str:
        """Return what tells a row's id from the same id in another source; empty if there is one source."""
        return ""

    def where(self, index: int) -> str:
        """Return the row's file and place, for errors."""
        place = f"row {index}" if self.line_numbers is None else f"line {self.line_numbers[index]}"
        return f"{self.name}, {place}"


@dataclass(frozen=True)
class Preset:
    """A data set of the hub under a short name.

    renamed: its columns, where their names are not usual ones. file: the address of a JSONL file that stands elsewhere.
    """

    hub: str
    split: str
    license: str
    subset: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None


# Chats that published heads are trained on (SpecForge, speculators, EAGLE). Licenses as their cards state them.
PRESETS = {
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "train", "apache-2.0"),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", "mit"),
    "perfectblend": Preset("mlabonne/open-perfectblend", "train", "apache-2.0"),
    "magpie": Preset("Magpie-Align/Magpie-Pro-300K-Filtered", "train", "llama3"),
    "gsm8k": Preset("openai/gsm8k", "train", "mit", "main", {"question": "prompt"}),
}


EAGLE_DATA = "https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data"
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SIX_TASKS = {
    "mt_bench": "Apache-2.0",
    "humaneval": "MIT",
    "gsm8k": "MIT",
    "alpaca": "CC BY-NC 4.0",
    "sum": "CNN/DailyMail's",
    "qa": "CC BY-SA 3.0",
}
# What drafters are measured on: benchmark -> its tasks; a name of nothing leaves rows their own.
BENCHMARKS: dict[str, dict[str, Preset]] = {
    "six-tasks": {
        task: Preset("json", "train", license, file=f"{EAGLE_DATA}/{task}/question.jsonl")
        for task, license in SIX_TASKS.items()
    },
    "spec-bench": {"": Preset("json", "train", "Apache-2.0, and its sources'", file=SPEC_BENCH)},
    "speed-bench": {"": Preset("nvidia/SPEED-Bench", "test", "NVIDIA Evaluation Dataset License", "qualitative")},
    # Of DeepSpec's tables (DSpark, 2026), what is on the hub with plain columns.
    "deepspec": {
        "gsm8k": Preset("openai/gsm8k", "test", "MIT", "main", {"question": "prompt"}),
        "math500": Preset("HuggingFaceH4/MATH-500", "test", "MIT", renamed={"problem": "prompt"}),
        "aime25": Preset("math-ai/aime25", "test", "Apache-2.0", renamed={"problem": "prompt"}),
        "humaneval": Preset("openai/openai_humaneval", "test", "MIT"),
        "mbpp": Preset("google-research-datasets/mbpp", "test", "CC BY 4.0", "sanitized"),
        "mt_bench": Preset("HuggingFaceH4/mt_bench_prompts", "train", "Apache-2.0", renamed={"prompt": "turns"}),
    },
}


def named_presets() -> dict[str, Preset]:
    """Return every data set that has a short name; tasks of benchmarks by `benchmark/task`."""
    tasks = {
        "/".join(filter(None, (name, task))): preset
        for name, benchmark in BENCHMARKS.items()
        for task, preset in benchmark.items()
    }
    return PRESETS | tasks


class JoinedSource(RowSource):
    """Rows of several sources, one source after the other."""

    def __init__(self, parts: Sequence[RowSource]):
        digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
        name, taken = ", ".join(str(part.name) for part in parts), all(part.split_taken for part in parts)
        super().__init__(name, digest, sum(map(len, parts)), self._read, split_taken=taken)
        self._parts = parts
        stems = [Path(part.name).stem for part in parts]
        self._prefixes = [f"{stem}/" if stems.count(stem) == 1 else f"{i}/" for i, stem in enumerate(stems, 1)]

    def prefix(self, index: int) -> str:
        number = self._place(index)[0]
        return "" if self._parts[number].content_ids else self._prefixes[number]

    def where(self, index: int) -> str:
        number, own = self._place(index)
        return self._parts[number].where(own)

    def _read(self, index: int) -> Any:
        number, own = self._place(index)
        return self._parts[number].read(own)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of a row's source, and of the row in it."""
        for number, part in enumerate(self._parts):
            if index < len(part):
                return number, index
            index -= len(part)
        raise IndexError(index)


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
    preset = named_presets().get(path)
    if preset is not None and not file.exists():
        source = _open_preset(path, preset, named_split(split), subset, revision)
    elif file.is_file():
        opener = OPENERS.get(file.suffix.lower())
        if opener is None:
            raise InputError("source", path, A_SOURCE, "Convert or unpack it.")
        try:
            source = opener(file)
        except OSError as error:
            raise InputError(str(file), f"unreadable ({error})", "a whole file", "Fetch it again.") from error
    # A hub id has one slash at most; anything else is a path.
    elif file.suffix.lower() in OPENERS or (not file.is_dir() and resolved.count("/") > 1):
        raise InputError("source", f"{path}, which does not exist", A_SOURCE, "Check the path.")
    elif not file.is_dir() and revision is None and looks_local(resolved):
        remedy = f"Check the path ({file.parts[0]}/ is here; with --revision main it is the hub's)."
        raise InputError("source", f"{path}, which does not exist", A_SOURCE, remedy)
    elif (file / MANIFEST).exists():
        remedy = "Pass the data that it was made from."
        raise InputError("source", f"{path}, an artifact of this program", "chats as they were written", remedy)
    else:
        source = _open_datasets(path, file, named_split(split), subset, revision)
    if not len(source):
        raise InputError("source", f"{path}, which is empty", "at least one row", "Check the data.")
    return source


def _open_preset(name: str, preset: Preset, split: str | None, subset: str | None, revision: str | None) -> RowSource:
    """Open a data set by its short name."""
    split, subset = split or preset.split, subset or preset.subset
    source = _open_datasets(preset.hub, Path(preset.hub), split, subset, revision, preset.file)
    log_note(f"{name}: {preset.file or preset.hub}, license {preset.license}")
    if not preset.renamed:
        return source

    def read(index: int) -> Row:
        return {preset.renamed.get(column, column): value for column, value in source.row(index).items()}

    return RowSource(source.name, source.digest, len(source), read, split_taken=True)


def named_split(split: str | None) -> str | None:
    """Return the split to keep; None for `none` or an empty name, which keep all rows."""
    return None if split is None or split.strip().lower() in ("", NO_FILTER) else split


def parse_json(text: bytes) -> Any:
    """Parse JSON.

    Raises:
        RowError: it is something else, or nested too deeply.
    """
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise RowError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"not JSON ({error})") from error


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the null fields inside a table's row: its columns have the fields of all rows' objects."""

    def dropped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: dropped(inner) for key, inner in value.items() if inner is not None}
        return [dropped(inner) for inner in value] if isinstance(value, list) else value

    return {name: dropped(value) for name, value in row.items()}


def _open_lines(path: Path) -> RowSource:
    """Open a file with one JSON object per line; blank lines are skipped."""
    file = path.open("rb")
    # Only the offsets are in memory: files of prompts may be larger than it.
    offsets: list[int] = []
    numbers: list[int] = []
    offset = 0
    for number, line in enumerate(file, start=1):
        start = len(BOM) if number == 1 and line.startswith(BOM) else 0
        if line[start:].strip():
            offsets.append(offset + start)
            numbers.append(number)
        offset += len(line)

    def read(index: int) -> Any:
        file.seek(offsets[index])
        return parse_json(file.readline())

    return RowSource(path, file_sha256(path), len(offsets), read, numbers)


def _open_json(path: Path) -> RowSource:
    """Open a .json file: a list of objects, an object that holds one such list, or JSON lines under this name."""
    raw = path.read_bytes().removeprefix(BOM)
    try:
        rows = parse_json(raw) if raw.strip() else []
    except RowError as error:
        if raw.lstrip().startswith(b"{"):
            return _open_lines(path)
        raise InputError(str(path), error, "a list of objects", "Check the file.") from error
    if isinstance(rows, dict):
        # A wrapper such as {"data": [...]} is common.
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise InputError(str(path), type(rows).__name__, "a list of objects", "Check the file.")
    return RowSource(path, hashlib.sha256(raw).hexdigest(), len(rows), rows.__getitem__)


def _open_parquet(path: Path) -> RowSource:
    """Open a Parquet file, memory-mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(str(path), f"unreadable ({error})", "a whole Parquet file", "Fetch it again.") from error

    def read(index: int) -> Any:
        try:
            return without_nulls(table.slice(index, 1).to_pylist()[0])
        except (ValueError, OverflowError) as error:
            # Text that is not UTF-8, a date outside of Python's range.
            raise RowError(f"unreadable ({error})") from error

    return RowSource(path, file_sha256(path), table.num_rows, read)


OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": _open_lines,
    ".ndjson": _open_lines,
    ".json": _open_json,
    ".parquet": _open_parquet,
}


def _open_datasets(
    name: str, path: Path, split: str | None, subset: str | None, revision: str | None, file: str | None = None
) -> RowSource:
    """Open a `datasets` directory or hub id. file: the data, where the id names a kind of files, such as json."""
    import datasets

    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), subset, data_files=file, revision=revision)
    except Exception as error:
        # Datasets and the hub client raise many kinds: no such id, no network, no access.
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:120]}"
        raise InputError("source", f"{name} ({reason})", A_SOURCE, "Check it, or log in.") from error
    # Several splits: one must be named.
    if isinstance(loaded, datasets.DatasetDict):
        names = list(loaded)
        chosen = split or (names[0] if len(names) == 1 else None)
        if chosen not in names:
            raise InputError("split", split, f"one of {', '.join(names)}", "Pass --split NAME.")
        loaded = loaded[chosen]

    def read(index: int) -> Any:
        try:
            return without_nulls(loaded[index])
        except Exception as error:
            # Decoders of pictures, sound and text raise many kinds.
            raise RowError(f"unreadable ({type(error).__name__}: {error})") from error

    # The fingerprint covers a hub data set's files and revision; the Arrow files stay in the cache.
    digest = hashlib.sha256(f"{name} {subset} {revision} {split} {loaded._fingerprint}".encode()).hexdigest()
    return RowSource(name, digest, len(loaded), read, split_taken=True)
