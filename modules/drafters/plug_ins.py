"""Drafters of a user's own, from a folder of Python files: heads, and methods without training.

docs/examples/drafters and benchmarks/papers/drafters are such folders.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.machinery import FileFinder

from draftsmith.modules import drafters
from draftsmith.modules.drafters.method_names import known_methods
from draftsmith.modules.drafters.methods import methods_of
from draftsmith.modules.drafters.settings import Kind
from draftsmith.modules.types import InputError


def add_folder(folder: str) -> None:
    """Register the drafters of another folder: heads listed in its files' HEADS, and methods in their METHODS.

    A file NAME.py is imported as `draftsmith.modules.drafters.NAME`; files of the folder import each other relatively.

    Raises:
        InputError: the folder holds no Python files or none that lists anything, or a file, head or method with a name
            that is taken.
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
            for head in getattr(module, "HEADS", ())
        }
        if clash := sorted(kind for kind in kinds if drafters.HEADS.get(kind, kinds[kind]) != kinds[kind]):
            raise InputError("HEADS", f"{', '.join(clash)} in {name}.py", "kinds that are not taken", "Rename it.")
        drafters.HEADS |= kinds
        methods = dict(getattr(module, "METHODS", {}))
        for kind in kinds:
            methods |= methods_of(kind)
        if clash := sorted(key for key in methods if known_methods().get(key, methods[key]) != methods[key]):
            raise InputError("METHODS", f"{', '.join(clash)} in {name}.py", "names that are not taken", "Rename it.")
        known_methods().update(methods)
        listed |= bool(methods)
    if not listed:
        raise InputError("drafters", folder, "a file that lists HEADS or METHODS", "List what the files define.")
