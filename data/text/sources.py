"""Rows of files, directories and hub ids, by number, as `datasets` reads them.

Lines of JSON stay text until a row is asked for, so that rows may have different columns, and a damaged line is one bad
row. JSON is UTF-8, with or without a byte-order mark.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from draftsmith.data.console import log_note
from draftsmith.data.store.datasets import quiet_datasets
from draftsmith.data.store.manifest import MANIFEST
from draftsmith.data.text.template import RowError
from draftsmith.modules.pretrained.hub import EMBEDDED, looks_local, resolve_model
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]
BOM = b"\xef\xbb\xbf"
BLOCK = 64  # rows that are read together
# The value of --split that turns its filter off.
NO_FILTER = "none"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
# How `datasets` names their kinds, and those of other tables.
KINDS = dict.fromkeys(SUFFIXES[:3], "json") | {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
A_SOURCE = "a .jsonl, .json or .parquet file, a directory or a hub id of `datasets`"


@dataclass
class RowSource:
    """Rows of a file or data set, by number.

    name: of the file or data set. stored: the rows as they are stored, a `datasets.Dataset` or a range of numbers.
    parse: makes a row of a stored one, or raises RowError. hash_content: identifies the content. split_taken: the rows
    are one split already. content_ids: ids are hashes of the content, so that equal ones are duplicates in any source.
    """

    name: str | Path
    stored: Any
    parse: Callable[[Any], Any]
    hash_content: Callable[[], str]
    split_taken: bool = False
    content_ids: bool = False
    _block: tuple[int, Mapping[str, Any] | None] = (-1, None)

    def __len__(self) -> int:
        return len(self.stored)

    @functools.cached_property
    def digest(self) -> str:
        return self.hash_content()

    def row(self, index: int) -> Row:
        """Return a row; raise RowError if it cannot be read or is no object."""
        try:
            stored = self._read(index)
        except Exception as error:
            # Text that is not UTF-8; and decoders of pictures and sound raise many kinds.
            raise RowError(f"unreadable ({type(error).__name__}: {error})") from error
        value = self.parse(stored)
        if not isinstance(value, dict):
            raise RowError(f"a JSON {type(value).__name__}, not an object")
        return value

    def _read(self, index: int) -> Any:
        """Read a stored row: of a data set with its neighbors, as one alone takes several times as long."""
        if not hasattr(self.stored, "column_names"):
            return self.stored[index]
        first = index - index % BLOCK
        if self._block[0] != first:
            self._block = first, None
            # If one of them cannot be read, each is read alone.
            with suppress(Exception):
                self._block = first, self.stored[first : first + BLOCK]
        columns = self._block[1]
        return self.stored[index] if columns is None else {name: columns[name][index - first] for name in columns}

    def where(self, index: int) -> str:
        """Return the row's file and place, for errors."""
        line = self.stored[index].get("line") if self.parse is parse_line else None
        return f"{self.name}, {f'line {line}' if line else f'row {index}'}"


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
# Their tasks have short names too, benchmark/task.
for name, benchmark in BENCHMARKS.items():
    PRESETS |= {f"{name}/{task}" if task else name: preset for task, preset in benchmark.items()}


def open_source(path: str, split: str | None = None, subset: str | None = None) -> RowSource:
    """Open a file or data set of prompts.

    split: of a data set, or a slice such as train[:1%], which takes a file as `train`; rows of a file are filtered by
    their own column `split`. subset: of a data set.

    Raises:
        InputError: nothing there, another kind of file, an empty one, or a split that must be named.
    """
    resolved = resolve_model(path) if path.startswith(EMBEDDED) else path
    file, split = Path(resolved), named_split(split)
    preset = PRESETS.get(path)
    if preset is not None and not file.exists():
        split, subset = split or preset.split, subset or preset.subset
        if preset.file:
            source = _open_file(preset.file, split)
            source.split_taken = True
        else:
            source = _open_data_set(preset.hub, split, subset)
            source.parse = functools.partial(table_row, renamed=preset.renamed)
        log_note(f"{path}: {preset.file or preset.hub}, license {preset.license}")
    elif file.is_file():
        if file.suffix.lower() not in SUFFIXES:
            raise InputError("source", path, A_SOURCE, "Convert or unpack it.")
        source = _open_file(resolved, split)
    # A hub id has one slash at most; anything else is a path.
    elif file.suffix.lower() in SUFFIXES or (not file.is_dir() and resolved.count("/") > 1):
        raise InputError("source", f"{path}, which does not exist", A_SOURCE, "Check the path.")
    elif not file.is_dir() and looks_local(resolved):
        remedy = f"Check the path ({file.parts[0]}/ is here, so it is not looked for on the hub)."
        raise InputError("source", f"{path}, which does not exist", A_SOURCE, remedy)
    elif (file / MANIFEST).exists():
        remedy = "Pass the data that it was made from."
        raise InputError("source", f"{path}, an artifact of this program", "chats as they were written", remedy)
    else:
        source = _open_data_set(path, split, subset)
    if not len(source):
        raise InputError("source", f"{path}, which is empty", "at least one row", "Check the data.")
    return source


def named_split(split: str | None) -> str | None:
    """Return the split to keep; None for `none` or an empty name, which keep all rows."""
    return None if split is None or split.strip().lower() in ("", NO_FILTER) else split


def parse_json(text: bytes) -> Any:
    """Parse JSON.

    Raises:
        RowError: it is something else, or nested too deeply.
    """
    try:
        return json.loads(text.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise RowError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"not JSON ({error})") from error


def parse_line(stored: Mapping[str, Any]) -> Any:
    """Parse a line of a file."""
    return parse_json(stored["text"].encode("latin-1"))


def table_row(stored: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Drop the null fields inside a table's row: its columns have the fields of all rows' objects.

    renamed: other names of columns.
    """

    def dropped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: dropped(inner) for key, inner in value.items() if inner is not None}
        return [dropped(inner) for inner in value] if isinstance(value, list) else value

    return {(renamed or {}).get(name, name): dropped(value) for name, value in stored.items()}


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Raise InputError if `datasets` cannot read a source; its own messages are silenced."""
    try:
        with quiet_datasets():
            yield
    except InputError:
        raise
    except Exception as error:
        # Datasets and the hub client raise many kinds: no such id, no network, no access, a damaged file.
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:120]}"
        remedy = "Check it; log in for a private data set, fetch a damaged file again."
        if isinstance(cause, ImportError):
            remedy = "Unpack it, or install the package that reads it."
        if any(words in str(cause) for words in ("Couldn't cast", "as a scalar of type")):
            remedy = "Its files have different columns or types: name them one by one, separated by commas."
        raise InputError("source", f"{name}, unreadable ({reason})", A_SOURCE, remedy) from error


def _open_file(path: str, split: str | None) -> RowSource:
    """Open a file, or JSON lines at an address."""
    import datasets

    # A link may change: what is read, and its hash, are of one file.
    file, suffix = Path(path).resolve(), Path(path).suffix.lower()
    is_table, is_local = suffix == ".parquet", file.is_file()
    content = file_sha256(file) if is_local else None
    with loading(path):
        if is_local and not file.stat().st_size:
            rows = datasets.Dataset.from_dict({"text": []})
        elif suffix == ".json" and is_local and (listed := _read_list(file)) is not None:
            rows = datasets.Dataset.from_dict({"text": [json.dumps(row) for row in listed]})
        else:
            # The content's hash names the copy in the cache: a file may change and keep its time.
            # Bytes pass through latin-1 unchanged, so that a line that is not UTF-8 is its row's fault.
            kind, options = ("parquet", {}) if is_table else ("text", {"encoding": "latin-1"})
            # A path is no pattern of names.
            files = glob.escape(str(file)) if is_local else path
            rows = datasets.load_dataset(kind, content, data_files=files, split="train", **options)
            rows = rows if is_table else _number_lines(rows)
    source = _of_table(path, rows, split)
    source.parse = table_row if is_table else parse_line
    if content is not None:
        source.hash_content = functools.partial(str, content)
    return source


def _read_list(path: Path) -> list[Any] | None:
    """Read a .json file: a list of objects, or an object that holds one such list; None for lines under this name."""
    raw = path.read_bytes().removeprefix(BOM)
    try:
        rows = parse_json(raw) if raw.strip() else []
    except RowError as error:
        if raw.lstrip().startswith(b"{"):
            return None
        raise InputError(str(path), error, "a list of objects", "Check the file.") from error
    if isinstance(rows, dict):
        # A wrapper such as {"data": [...]} is common.
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise InputError(str(path), type(rows).__name__, "a list of objects", "Check the file.")
    return rows


def _number_lines(rows: Any) -> Any:
    """Add the numbers of lines, from 1, and leave out blank ones."""
    trimmed = (pc.utf8_trim(chunk, characters=string.whitespace) for chunk in rows.data["text"].chunks)
    filled = np.concatenate([np.asarray(pc.not_equal(chunk, "")) for chunk in trimmed])
    # A byte-order mark alone is no row.
    filled[0] &= bool(rows[0]["text"].encode("latin-1").removeprefix(BOM).strip())
    return rows.add_column("line", np.arange(1, len(rows) + 1)).select(np.flatnonzero(filled))


def _open_data_set(name: str, split: str | None, subset: str | None) -> RowSource:
    """Open a `datasets` directory or hub id, at a revision as `owner/name@revision`."""
    import datasets

    path = Path(name)
    hub_id, _, revision = name.partition("@") if not path.exists() else (name, "", "")
    with loading(name):
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            splits = datasets.load_from_disk(str(path.resolve()))
        else:
            splits = datasets.load_dataset(hub_id, subset, revision=revision or None)
            # Of a folder it reads the kind of file that is most frequent.
            kind = next(iter(splits.values())).info.builder_name
            others = [file for file in path.rglob("*") if KINDS.get(file.suffix.lower(), kind) != kind]
            if others:
                remedy = "Name the files one by one, separated by commas, to read all of them."
                log_note(f"{name}: {len(others)} files are not read, such as {others[0].name}. {remedy}")
    return (_of_table if isinstance(splits, datasets.Dataset) else _of_splits)(name, splits, split)


def _of_table(name: str, rows: Any, split: str | None) -> RowSource:
    """Take a table without splits, or a slice of it as `train`; a split's name filters its rows later."""
    slices = split if split and "[" in split else None
    source = _of_splits(name, {"train": rows}, slices)
    source.split_taken = slices is not None
    return source


def _of_splits(name: str, splits: Mapping[str, Any], split: str | None) -> RowSource:
    """Take a split, or slices of splits such as train[:1%]+test[10:20]; the only one if none is named."""
    import datasets

    chosen = split or (next(iter(splits)) if len(splits) == 1 else "")
    expected = f"one of {', '.join(splits)}"
    try:
        parts = datasets.ReadInstruction.from_spec(chosen).to_absolute({own: len(splits[own]) for own in splits})
    except (ValueError, AssertionError) as error:
        remedy = "Pass --split NAME, or a slice such as train[:1%]."
        raise InputError("split", split, expected, remedy) from error
    for part in parts:
        # Of a split without rows, the file is at fault.
        if part.from_ >= part.to and (size := len(splits[part.splitname])):
            found, remedy = f"{split}, which takes none of {part.splitname}'s {size:,} rows", "Correct the slice."
            raise InputError("split", found, "slices with at least one row each", remedy)
    slices = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    rows = slices[0] if len(slices) == 1 else datasets.concatenate_datasets(slices)
    return RowSource(name, rows, table_row, functools.partial(_hash_rows, rows), split_taken=True)


def _hash_rows(rows: Any) -> str:
    """Hash the rows of a data set."""
    digest = hashlib.sha256(repr(rows.features).encode())
    for table in rows.with_format("arrow").iter(1000):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()
