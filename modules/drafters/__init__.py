"""Registry of trained drafters.

A trained drafter is a `DraftHead` (base.py) with a row in HEADS (settings.py), which needs no torch: the command line
lists drafters without importing it. The names of decoding methods follow from it (methods.py), and a user's own are
added to it (plug_ins.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from draftsmith.modules.drafters.settings import HEADS

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead

# The drafter of methods that draft with a language model; others are the kinds of trained drafters.
MODEL = "draft"


def learned() -> dict[str, str]:
    """Return the kind of every trained drafter with its line of help."""
    return {kind: row.help for kind, row in sorted(HEADS.items())}


def head_class(kind: str) -> type[DraftHead]:
    """Import the head of a kind. Raises KeyError for an unknown kind."""
    module, _, name = HEADS[kind].head.partition(":")
    head: type[DraftHead] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return head
