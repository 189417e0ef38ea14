"""Drafters, learned and training-free: whatever proposes tokens for a target to verify.

The folder is the registry. A learned drafter is a file NAME.py, or NAME/head.py, with a `DraftHead` (base.py) of that
`kind`. Names and one line of help are read from the source, so that the command line knows them before torch is there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import pkgutil
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead


def learned() -> dict[str, str]:
    """Kind of every learned drafter -> the first line of its docstring (of the folder, where it has one)."""
    return _learned_in(tuple(__path__))


@functools.cache
def _learned_in(folders: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(folders)):
        if re.search(rf'^    kind = "{name}"$', _source(_module_of(name)), re.MULTILINE):
            found[name] = (ast.get_docstring(ast.parse(_source(f"{__name__}.{name}"))) or name).splitlines()[0]
    return found


def add_folder(folder: str) -> None:
    """Files of another folder count as drafters too: learned ones, and methods that they list in METHODS.

    Raises:
        InputError: no Python files there.
    """
    if not any(pkgutil.iter_modules([folder])):
        raise InputError("drafters", folder, "a folder of Python files", "Correct the path.")
    if folder not in __path__:
        __path__.append(folder)


def head_class(kind: str) -> type[DraftHead]:
    """The head of a kind, imported when it is asked for."""
    if kind not in learned():
        raise KeyError(kind)
    from draftsmith.modules.drafters.base import DraftHead

    values = vars(importlib.import_module(_module_of(kind))).values()
    return next(v for v in values if isinstance(v, type) and issubclass(v, DraftHead) and vars(v).get("kind") == kind)


def _module_of(name: str) -> str:
    """Where the head of a drafter is, if it has one."""
    spec = find_spec(f"{__name__}.{name}")
    assert spec is not None, name
    head = spec.submodule_search_locations is not None and find_spec(f"{__name__}.{name}.head") is not None
    return f"{__name__}.{name}.head" if head else f"{__name__}.{name}"


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader), module
    return spec.loader.get_source(module) or ""
