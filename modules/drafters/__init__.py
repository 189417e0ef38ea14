"""Registry of trained drafters.

A trained drafter is a `DraftHead` (base.py) listed in HEADS, which holds names only: the command line lists drafters
without importing torch. The names of decoding methods follow from it (methods.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead

# Kind of each trained drafter -> module of this package, and its line of help.
HEADS = {
    "dflash": ("block.head", "DFlash: drafts a whole block in one pass, each token from its slot (Chen et al. 2026)."),
    "dflash2": (
        "block.head",
        "DFlash2: drafts a block in one pass, its tokens chosen in order among the likeliest (z-lab/dflash 2026).",
    ),
    "draft": (
        "draft_model",
        "Draft model: some of the target's layers, distilled on its answers (DistillSpec, Zhou et al. 2023).",
    ),
    "dspark": (
        "block.head",
        "DSpark: drafts a block in one pass, its tokens in order, with a confidence head (deepseek-ai/DeepSpec 2026).",
    ),
    "eagle": ("eagle", "EAGLE head: drafts from the target's own features (Li et al. 2024, both papers)."),
    "eagle3": (
        "eagle3",
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
    "mtp": ("mtp", "MTP: the multi-token-prediction layer that ships with the target (DeepSeek-V3; Qwen3-Next)."),
}


# The drafter of methods that draft with a language model; others are the kinds of trained drafters.
MODEL = "draft"


def learned() -> dict[str, str]:
    """Return the kind of every trained drafter with its line of help."""
    return {kind: summary for kind, (_, summary) in sorted(HEADS.items())}


def head_class(kind: str) -> type[DraftHead]:
    """Import the head of a kind. Raises KeyError for an unknown kind."""
    from draftsmith.modules.drafters.base import DraftHead

    values = vars(importlib.import_module(f"{__name__}.{HEADS[kind][0]}")).values()
    return next(v for v in values if isinstance(v, type) and issubclass(v, DraftHead) and vars(v).get("kind") == kind)


def settings_class(kind: str) -> type:
    """Return the class of the options of `train KIND`; it needs no torch, but for a user's own head."""
    from draftsmith.modules.drafters.settings import SETTINGS

    return SETTINGS[kind] if kind in SETTINGS else head_class(kind).Settings
