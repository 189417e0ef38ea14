"""Registry of drafters: trained heads by kind, decoding methods by name.

A trained drafter is a `DraftHead` (base.py) listed in HEADS, which holds names only: the command line lists drafters
without importing torch. methods.py lists the modules with decoding methods.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead

# Kind of each trained drafter -> module of this package, and its line of help.
HEADS = {
    "dflash": ("block.head", "DFlash: drafts a whole block in one pass, each token from its slot (Chen et al. 2026)."),
    "draft": (
        "draft",
        "Draft model: some of the target's layers, distilled on its answers (DistillSpec, Zhou et al. 2023).",
    ),
    "dspark": (
        "block.head",
        "DSpark: drafts a block in one pass, its tokens in order, with a confidence head (deepseek-ai/DeepSpec 2026).",
    ),
    "eagle": ("eagle.head", "EAGLE head: drafts from the target's own features (Li et al. 2024, both papers)."),
    "eagle3": (
        "eagle3.head",
        "EAGLE-3: drafts from several layers of the target, trained on its own states (Li et al. 2025).",
    ),
    "hydra": (
        "hydra",
        "Hydra: Medusa's heads made sequential, each reading the tokens drafted before its own (Ankner et al. 2024).",
    ),
    "medusa": (
        "medusa",
        "Medusa-1: heads beside the target's own that guess the tokens further ahead (Cai et al. 2024).",
    ),
}


def learned() -> dict[str, str]:
    """Return the kind of every trained drafter with its line of help."""
    return {kind: summary for kind, (_, summary) in sorted(HEADS.items())}


def head_class(kind: str) -> type[DraftHead]:
    """Import the head of a kind. Raises KeyError for an unknown kind."""
    from draftsmith.modules.drafters.base import DraftHead

    values = vars(importlib.import_module(f"{__name__}.{HEADS[kind][0]}")).values()
    return next(v for v in values if isinstance(v, type) and issubclass(v, DraftHead) and vars(v).get("kind") == kind)


def add_folder(folder: str) -> None:
    """Register the drafters of another folder: heads named like their file, and methods listed in METHODS.

    Raises:
        InputError: the folder holds no Python files, or a file, head or method with a name that is taken.
    """
    modules = list(pkgutil.iter_modules([folder]))
    if not modules:
        raise InputError("drafters", folder, "a folder of Python files", "Correct the path.")
    # Its absolute path.
    finder: Any = modules[0].module_finder
    folder, names = finder.path, [module.name for module in modules]
    # Python would import the file of the first folder, without a word.
    taken = {module.name for module in pkgutil.iter_modules(path for path in __path__ if path != folder)}
    if clash := sorted(taken & set(names)):
        raise InputError("drafters", f"{', '.join(clash)} in {folder}", "names that are not taken", "Rename it.")
    if folder not in __path__:
        __path__.append(folder)
    from draftsmith.modules.drafters.base import DraftHead
    from draftsmith.modules.drafters.methods import known_methods

    for name in names:
        # A second call finds the module imported, or the file fails again.
        module = importlib.import_module(f"{__name__}.{name}")
        methods = vars(module).get("METHODS", {})
        if clash := sorted(key for key in methods if known_methods().get(key, methods[key]) is not methods[key]):
            raise InputError("METHODS", f"{', '.join(clash)} in {name}.py", "names that are not taken", "Rename it.")
        known_methods().update(methods)
        own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__.startswith(module.__name__)]
        kinds = {vars(head)["kind"] for head in own if issubclass(head, DraftHead) and "kind" in vars(head)}
        if kinds - {name}:
            raise InputError("kind", f"{', '.join(kinds)} in {name}.py", f"{name}, as the file", "Rename one.")
        if kinds:
            HEADS[name] = name, (module.__doc__ or name).splitlines()[0]
