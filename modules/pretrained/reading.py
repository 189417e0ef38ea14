"""Read files that a disk, an editor or another program may have damaged, and report damage in one line.

Errors name the file, the place in it, and the remedy.
"""

from __future__ import annotations

import csv
import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.modules.types import InputError

JSON_BYTES = 512 * 2**20  # the largest tokenizers and indexes have a tenth
HEADER_BYTES = 100 * 2**20  # as the format's library allows
LFS = b"version https://git-lfs"
REMEDY = "Delete it and give the command that wrote it again."
FETCH = "Fetch or build it again."
# JSON of types: {"files": [{"name": str}], "counts": {"*": int}, "seed?": (int, None)}. A name with `?` may be absent,
# `*` stands for all names, a tuple for alternatives, `object` for anything. Names that are not listed may be there.
Shape = Any
NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list"}


def regular(path: Path) -> Path:
    """Return a path, unless a reader of it would wait or fill the memory: a pipe, a device, or JSON of gigabytes.

    Raises:
        OSError: there is no such file. InputError: it is none to read.
    """
    kind, size = path.stat().st_mode, path.stat().st_size
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise InputError(str(path), "a pipe or a device", "a file", "Check the path.")
    if path.suffix == ".json" and size > JSON_BYTES:
        raise InputError(str(path), f"{size:,} bytes of JSON", f"at most {JSON_BYTES:,}", "Check the path.")
    return path


def read_object(path: Path, shape: Mapping[str, Shape], remedy: str = REMEDY) -> dict[str, Any]:
    """Read a JSON object of this shape.

    Raises:
        OSError: there is no such file. InputError: its content is not JSON, or has another shape.
    """
    file = regular(Path(path))
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        # No JSON, no UTF-8, or nested without end.
        raise unreadable(path, f"damaged ({error})", "JSON", remedy) from error
    check_shape(path, content, shape, remedy)
    return content


def read_model_json(file: Path, shape: Mapping[str, Shape] | None = None) -> dict[str, Any]:
    """Read the JSON object in a file of a model, as `read_object`; InputError also if there is no such file."""
    try:
        return read_object(file, shape or {}, FETCH)
    except OSError as error:
        raise InputError(str(file), error.strerror or "unreadable", "a file with JSON", FETCH) from error


def weight_map(index: Path, remedy: str = FETCH) -> dict[str, str]:
    """Read the map of tensors to files in an index of shards; raise InputError if it has none."""
    names = read_model_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(str(index), "no weight_map of names", "a tensor's name -> its file", remedy)
    return names


def read_lines(path: Path, shape: Mapping[str, Shape], remedy: str = REMEDY) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. An error names the line's number."""
    with regular(Path(path)).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(str(path), f"damaged in line {number} ({error})", "a JSON object", remedy) from error
            check_shape(path, content, shape, remedy, f"line {number}")
            yield content


def read_text(path: Path, expected: str, remedy: str = REMEDY) -> str:
    """Read a UTF-8 file, with or without a byte-order mark. expected: its content in words, for the error."""
    try:
        return regular(Path(path)).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"bytes that are not UTF-8 ({error.reason})", expected, remedy) from error


def metric_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a training's metrics.csv, with cells as text.

    A last line without an end is being written, or was torn by a kill, and is left out.

    Raises:
        OSError: there is no such file. InputError: its lines are not steps and numbers.
    """
    expected, remedy = "the metrics of a training", "Correct it, or move it away."
    text = read_text(path, expected, remedy)
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    rows: list[dict[str, str]] = []
    try:
        for row in reader:
            int(row["step"])
            for cell in filter(None, row.values()):
                float(cell)
            rows.append({name: cell or "" for name, cell in row.items()})
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        found = f"damaged in line {reader.line_num} ({type(error).__name__}: {error})"
        raise InputError(str(path), found, expected, remedy) from error
    return rows


@contextmanager
def whole_file(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Raise InputError for a safetensors file that turns out to be damaged inside this context."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise unreadable(path, f"damaged ({error})", "a whole safetensors file", remedy) from error


@contextmanager
def open_tensors(path: Path, remedy: str = REMEDY) -> Iterator[safe_open]:
    """Open a safetensors file; InputError if it is damaged, whether that shows at once or in a later read."""
    with whole_file(path, remedy), safe_open(regular(Path(path)), framework="pt") as file:
        yield file


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. dtype: as its header names it, `BF16`. place: of its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    place: tuple[int, int]


def tensor_headers(path: Path, remedy: str = REMEDY) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file, without mapping its values; InputError if the file is damaged."""
    try:
        with regular(path).open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            end = path.stat().st_size
            if start > min(end, HEADER_BYTES):
                raise ValueError(f"a header of {start - 8:,} bytes in {end:,}")
            header = json.loads(file.read(start - 8))
        stored = {
            name: StoredTensor(path, own["dtype"], tuple(own["shape"]), (start + first, start + last))
            for name, own in sorted(header.items())
            if name != "__metadata__"
            for first, last in [own["data_offsets"]]
        }
        if end != (named := max((one.place[1] for one in stored.values()), default=start)):
            raise ValueError(f"{end:,} bytes, and tensors up to byte {named:,}")
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, f"damaged ({error})", "a whole safetensors file", remedy) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, "damaged (no table of tensors)", "a whole safetensors file", remedy) from error
    return stored


def unreadable(path: Path, found: str, expected: str, remedy: str) -> InputError:
    """Return the error of a file that cannot be read. A clone without git-lfs has pointers in place of files."""
    with suppress(OSError), Path(path).open("rb") as file:
        if file.read(len(LFS)) == LFS:
            return InputError(str(path), "a git-lfs pointer", expected, "Fetch what it stands for: git lfs pull.")
    return InputError(str(path), found, expected, remedy)


def read_tensors(path: Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file."""
    with open_tensors(path, remedy) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def check_shape(path: Path, content: Any, shape: Shape, remedy: str = REMEDY, place: str = "") -> None:
    """Raise InputError for the first thing in a JSON value that its shape does not allow."""
    for wrong, expected in misfits(content, shape, place):
        raise InputError(str(path), wrong, expected, remedy)


def misfits(content: Any, shape: Shape, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (what is there, what is expected) for all that does not fit. place: of the content, for errors."""
    kind = shape if isinstance(shape, type) else type(shape)
    # True and False are integers in Python, but not here.
    is_kind = isinstance(content, (int, float) if kind is float else kind) and isinstance(content, bool) <= (
        kind is bool
    )
    if isinstance(shape, tuple):
        if all(any(misfits(content, option, place)) for option in shape):
            yield _shown(content, place), _shape_name(shape)
    elif shape is not object and not is_kind:
        yield _shown(content, place), _shape_name(shape)
    elif isinstance(shape, list):
        for number, item in enumerate(content):
            yield from misfits(item, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict):
        prefix = f"{place}." if place else ""
        for name, expected in shape.items():
            key = name.removesuffix("?")
            if name == key != "*" and key not in content:
                yield f"no {prefix}{key}", _shape_name(expected)
            for present in content if name == "*" else {key} & content.keys():
                yield from misfits(content[present], expected, f"{prefix}{present}")


def _shown(content: Any, place: str) -> str:
    text = json.dumps(content)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{place}: {text}" if place else text


def _shape_name(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(_shape_name(option) for option in shape)
    if shape is None:
        return "null"
    return NAMES.get(shape if isinstance(shape, type) else type(shape), "a value")
