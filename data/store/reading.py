"""How files are read that a disk, an editor or another program may have changed: what is not as it was written is one
line that names the file, the place in it and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.modules.types import InputError

REMEDY = "Delete it and give the command that wrote it again."
NUMBER = (int, float)
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
    if wrong := misfit(found, shape, place):
        raise InputError(str(path), wrong[0], wrong[1], remedy)


def misfit(found: Any, shape: Shape, place: str = "") -> tuple[str, str] | None:
    """What was found where, and what was expected there; None where all is right."""
    if shape is object:
        return None
    if isinstance(shape, tuple):
        options = [misfit(found, option, place) for option in shape]
        if None in options:
            return None
        # Of an object that is none of them, the objection inside of it says more.
        inner = [wrong for wrong, option in zip(options, shape, strict=True) if isinstance(option, type(found))]
        return inner[0] if inner else (_said(found, place), " or ".join(_name(option) for option in shape))
    if isinstance(shape, dict):
        return _misfit_of_object(found, shape, place)
    if isinstance(shape, list):
        if not isinstance(found, list):
            return _said(found, place), "a list"
        parts = (misfit(item, shape[0], f"{place}[{number}]") for number, item in enumerate(found))
        return next((wrong for wrong in parts if wrong), None)
    kinds = NUMBER if shape is float else (shape,)
    right = found is None if shape is None else isinstance(found, kinds) and isinstance(found, bool) <= (shape is bool)
    return None if right else (_said(found, place), _name(shape))


def _misfit_of_object(found: Any, shape: dict[str, Shape], place: str) -> tuple[str, str] | None:
    if not isinstance(found, dict):
        return _said(found, place), "an object"
    for name, expected in shape.items():
        if name == "*":
            parts = (misfit(value, expected, _inner(place, key)) for key, value in found.items())
            if wrong := next((wrong for wrong in parts if wrong), None):
                return wrong
            continue
        key = name.removesuffix("?")
        if key not in found:
            if name == key:
                return f"no {_inner(place, key)}", _name(expected)
        elif wrong := misfit(found[key], expected, _inner(place, key)):
            return wrong
    return None


def _inner(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _said(found: Any, place: str) -> str:
    text = json.dumps(found)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{place}: {text}" if place else text


def _name(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(_name(option) for option in shape)
    if shape is None:
        return "null"
    return NAMES.get(dict if isinstance(shape, dict) else list if isinstance(shape, list) else shape, "a value")
