"""Drafters of a user's own, from a folder of Python files: heads, and methods without training.

docs/examples/drafters and benchmarks/papers/drafters are such folders.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from importlib.machinery import FileFinder
from types import ModuleType

from draftsmith.modules import drafters
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.method import Method
from draftsmith.modules.drafters.method_names import known_methods
from draftsmith.modules.drafters.methods import OF_HEADS, methods_of
from draftsmith.modules.drafters.settings import Kind
from draftsmith.modules.types import InputError

NAME = re.compile(r"[\w+-]+")  # what a method's name can be where users write it


def listed_heads(module: ModuleType) -> list[type[DraftHead]]:
    """Return what a file lists in HEADS; raise InputError for anything but classes of heads."""
    heads, where = getattr(module, "HEADS", ()), f"HEADS of {module.__file__}"
    if not isinstance(heads, tuple | list):
        raise InputError(where, repr(heads), "a tuple of classes", "Write HEADS = (MyHead,).")
    for head in heads:
        if not (isinstance(head, type) and issubclass(head, DraftHead)):
            raise InputError(where, repr(head), "a class that derives from DraftHead", "Correct it.")
        if absent := [name for name in ("kind", "Config", "Settings") if not hasattr(head, name)]:
            raise InputError(where, f"{head.__name__} without {', '.join(absent)}", "a whole DraftHead", "Define it.")
        if not isinstance(head.kind, str) or not NAME.fullmatch(head.kind):
            raise InputError(where, repr(head.kind), "a kind of letters, digits, +, - and _", "Rename it.")
        if not isinstance(head.drafts, tuple) or not set(head.drafts) <= OF_HEADS.keys():
            found, expected = f"drafts {head.drafts!r} of {head.__name__}", f"some of {tuple(OF_HEADS)}"
            raise InputError(where, found, expected, "Correct it.")
    return list(heads)


def listed_methods(module: ModuleType) -> dict[str, Method]:
    """Return what a file lists in METHODS; raise InputError for anything but methods by their names."""
    methods, where = getattr(module, "METHODS", {}), f"METHODS of {module.__file__}"
    if not isinstance(methods, Mapping):
        raise InputError(where, repr(methods), "methods by their names", 'Write METHODS = {"mine": MyMethod()}.')
    for name, method in methods.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InputError(where, repr(name), "a name of letters, digits, +, - and _", "Rename it.")
        if not isinstance(method, Method):
            expected = "an object of a class that derives from Method"
            raise InputError(where, f"{name}: {method!r}", expected, f'Write "{name}": MyMethod().')
    return dict(methods)


def add_folder(folder: str) -> None:
    """Register the drafters of another folder: heads listed in its files' HEADS, and methods in their METHODS.

    A file NAME.py is imported as `draftsmith.modules.drafters.NAME`; files of the folder import each other relatively.

    Raises:
        InputError: the folder holds no Python files or none that lists anything, a file lists something else than heads
            and methods, or a name is taken.
    """
    modules = list(pkgutil.iter_modules([folder]))
    if not modules:
        raise InputError("drafters", folder, "a folder of Python files", "Correct the path.")
    finder, names, path = modules[0].module_finder, [module.name for module in modules], drafters.__path__
    assert isinstance(finder, FileFinder)
    folder = finder.path  # the absolute one
    # Python would import the file of the first folder, without a word.
    taken = {module.name for module in pkgutil.iter_modules(own for own in path if own != folder)}
    if clash := sorted(taken & set(names)):
        raise InputError("drafters", f"{', '.join(clash)} in {folder}", "names that are not taken", "Rename it.")
    if folder not in path:
        path.append(folder)
    listed = False
    for name in names:
        # A second call finds the module imported, or the file fails again.
        module = importlib.import_module(f"{drafters.__name__}.{name}")
        kinds = {
            head.kind: Kind(f"{name}:{head.__name__}", head.Settings, (module.__doc__ or name).splitlines()[0])
            for head in listed_heads(module)
        }
        if clash := sorted(kind for kind in kinds if drafters.HEADS.get(kind, kinds[kind]) != kinds[kind]):
            raise InputError("HEADS", f"{', '.join(clash)} in {name}.py", "kinds that are not taken", "Rename it.")
        drafters.HEADS |= kinds
        methods = listed_methods(module)
        for kind in kinds:
            methods |= methods_of(kind)
        if clash := sorted(key for key in methods if known_methods().get(key, methods[key]) != methods[key]):
            raise InputError("METHODS", f"{', '.join(clash)} in {name}.py", "names that are not taken", "Rename it.")
        known_methods().update(methods)
        listed |= bool(methods)
    if not listed:
        raise InputError("drafters", folder, "a file that lists HEADS or METHODS", "List what the files define.")
