"""How files are read that a disk, an editor or another program may have changed: what is not as it was written is one
line that names the file, the place in it and the remedy."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.modules.types import InputError

REMEDY = "Delete it and give the command that wrote it again."
# What a file may hold, as JSON of types: {"files": [{"name": str}], "counts": {"*": int}, "seed?": (int, None)}. A name
# with `?` may be absent, `*` stands for all names, a tuple for alternatives, `object` for anything. Other names may be
# there: later versions add some.
Shape = Any
NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it is not there. InputError: it is not JSON, so something else has damaged it.
    """
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested without end
        raise InputError(str(path), f"damaged ({error})", "JSON", remedy) from error


def read_object(path: Path, shape: Mapping[str, Shape], remedy: str = REMEDY) -> dict[str, Any]:
    """The JSON object in a file, which has this shape.

    Raises:
        OSError: it is not there. InputError: it is something else.
    """
    found = read_json(path, remedy)
    check_shape(path, found, shape, remedy)
    return found


def read_lines(path: Path, shape: Mapping[str, Shape], remedy: str = REMEDY) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file.

    Raises:
        OSError: it is not there. InputError: a line is something else; it is named by its number.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(str(path), f"damaged in line {number} ({error})", "a JSON object", remedy) from error
            check_shape(path, found, shape, remedy, f"line {number}")
            yield found


def read_text(path: Path, expected: str, remedy: str = REMEDY) -> str:
    """Read a text file. expected: its content in words, for the error.

    Raises:
        OSError: it is not there. InputError: it is not UTF-8.
    """
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"bytes that are not UTF-8 ({error.reason})", expected, remedy) from error


def metric_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a training's metrics.csv, with cells as text. A line that is being written, or that a kill tore, has no
    end and is left out.

    Raises:
        OSError: it is not there. InputError: its lines are not steps and numbers, so something else has damaged it.
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
def open_tensors(path: Path, remedy: str = REMEDY) -> Iterator[Any]:
    """An open safetensors file, `safe_open`'s.

    Raises:
        InputError: it is damaged or cannot be read, whether that shows at once or later.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(str(path), f"damaged ({error})", "a whole safetensors file", remedy) from error


def read_tensors(path: Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Errors as of `open_tensors`."""
    with open_tensors(path, remedy) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def check_shape(path: Path, found: Any, shape: Shape, remedy: str = REMEDY, place: str = "") -> None:
    """Raises:
    InputError: it has another shape.
    """
    for wrong, expected in misfits(found, shape, place):
        raise InputError(str(path), wrong, expected, remedy)


def misfits(found: Any, shape: Shape, place: str = "") -> Iterator[tuple[str, str]]:
    """What is wrong where, and what is expected there."""
    if isinstance(shape, tuple):
        options = [next(misfits(found, option, place), None) for option in shape]
        # Of an object that is none of them, the objection inside of it says more.
        inner = [
            wrong for wrong, option in zip(options, shape, strict=True) if wrong and isinstance(option, type(found))
        ]
        if None not in options:
            yield inner[0] if inner else (_said(found, place), _name(shape))
    elif not _is_a(found, shape):
        yield _said(found, place), _name(shape)
    elif isinstance(shape, list):
        for number, item in enumerate(found):
            yield from misfits(item, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict):
        inside = f"{place}." if place else ""
        for name, expected in shape.items():
            key = name.removesuffix("?")
            if name == key != "*" and key not in found:
                yield f"no {inside}{key}", _name(expected)
            named = found if name == "*" else {key} & found.keys()
            for own in named:
                yield from misfits(found[own], expected, f"{inside}{own}")


def _is_a(found: Any, shape: Shape) -> bool:
    """By its own type, not by what it holds."""
    if shape is object or shape is None:
        return shape is object or found is None
    kind = shape if isinstance(shape, type) else type(shape)
    return isinstance(found, (int, float) if kind is float else kind) and isinstance(found, bool) <= (kind is bool)


def _said(found: Any, place: str) -> str:
    text = json.dumps(found)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{place}: {text}" if place else text


def _name(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(_name(option) for option in shape)
    if shape is None:
        return "null"
    return NAMES.get(shape if isinstance(shape, type) else type(shape), "a value")
