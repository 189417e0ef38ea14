"""Draftsmith: trains the learned parts of speculative decoding and measures what they are worth.

The names below are what a script or a notebook uses; they are the objects that the commands use (docs/python.md).
Importing the package loads nothing heavy: each name is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Name -> its module and its name there.
PUBLIC = {
    "load_target": ("modules.pretrained.models", "load_lm"),
    "load_tokenizer": ("modules.pretrained.checkpoint", "load_tokenizer"),
    "load_drafter": ("eval.answer", "load_drafter"),
    "load_head": ("modules.pretrained.heads", "load_draft_head"),
    "generate": ("eval.answer", "generate"),
    "open_dataset": ("data.store.datasets", "as_dataset"),
    "collate": ("data.store.datasets", "collate_features"),
    "settings": ("launch.python", "settings"),
    "new_head": ("train.prepare", "make_head"),
    "add_drafters": ("modules.drafters.plug_ins", "add_folder"),
    "LitDrafter": ("train.module", "LitDrafter"),
    "HeadDataModule": ("train.data", "HeadDataModule"),
    "fit": ("train.fit", "fit"),
    "save": ("modules.pretrained.card", "save"),
    "export": ("launch.python", "export"),
    "run": ("launch.python", "run"),
    "InputError": ("modules.types", "InputError"),
}
__all__ = [
    "HeadDataModule",
    "InputError",
    "LitDrafter",
    "__version__",
    "add_drafters",
    "collate",
    "export",
    "fit",
    "generate",
    "load_drafter",
    "load_head",
    "load_target",
    "load_tokenizer",
    "new_head",
    "open_dataset",
    "run",
    "save",
    "settings",
]

if TYPE_CHECKING:
    from draftsmith.data.store.datasets import as_dataset as open_dataset
    from draftsmith.data.store.datasets import collate_features as collate
    from draftsmith.eval.answer import generate as generate
    from draftsmith.eval.answer import load_drafter as load_drafter
    from draftsmith.launch.python import export as export
    from draftsmith.launch.python import run as run
    from draftsmith.launch.python import settings as settings
    from draftsmith.modules.drafters.plug_ins import add_folder as add_drafters
    from draftsmith.modules.pretrained.card import save as save
    from draftsmith.modules.pretrained.checkpoint import load_tokenizer as load_tokenizer
    from draftsmith.modules.pretrained.heads import load_draft_head as load_head
    from draftsmith.modules.pretrained.models import load_lm as load_target
    from draftsmith.modules.types import InputError as InputError
    from draftsmith.train.data import HeadDataModule as HeadDataModule
    from draftsmith.train.fit import fit as fit
    from draftsmith.train.module import LitDrafter as LitDrafter
    from draftsmith.train.prepare import make_head as new_head

    __version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("draftsmith")
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = PUBLIC[name]
    return getattr(import_module(f"draftsmith.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
