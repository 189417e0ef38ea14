"""Public formats: pure maps between our state dicts and what other systems write and read.

The folder is the registry: a format of heads is a file with a `HeadFormat` (base.py), whose `name` is what users write.
`hf_assisted` is the format of a draft model, which is no head.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.modules.formats.base import HeadFormat


@functools.cache
def formats() -> dict[tuple[str, str], HeadFormat]:
    """Every format of heads by its name and the kind of our heads that it holds: a server's name stands for as many
    formats as it loads kinds of heads."""
    from draftsmith.modules.formats.base import HeadFormat

    found: dict[tuple[str, str], HeadFormat] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        classes = (value for value in vars(module).values() if isinstance(value, type))
        own = (value for value in classes if issubclass(value, HeadFormat) and value.__module__ == module.__name__)
        found |= {(value.name, value.kind): value() for value in own if "name" in vars(value)}
    return found


def format_names() -> tuple[str, ...]:
    """As users write them."""
    return tuple(dict.fromkeys(name for name, _ in formats()))


def formats_of(kind: str) -> list[HeadFormat]:
    """The formats that hold a kind of head; a drafter may have none yet."""
    return [format for format in formats().values() if format.kind == kind]
