"""Registry of trained drafters.

A trained drafter is a `DraftHead` (base.py) listed in HEADS, which holds names only: the command line lists drafters
without importing torch. The names of decoding methods follow from it (methods.py), and a user's
own are added to it (plug_ins.py).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.modules.drafters.base import DraftHead
    from draftsmith.modules.drafters.settings import HeadSettings


@dataclass(frozen=True)
class Kind:
    """Names of a trained drafter's classes, `module:class` in this package, and its line of help.

    settings: the class of its options, from a module that needs no torch; empty for that of the head.
    """

    head: str
    help: str
    settings: str = ""


HEADS = {
    "dflash": Kind(
        "block.head:DFlashHead",
        "DFlash: drafts a whole block in one pass, each token from its slot (Chen et al. 2026).",
        "settings:DFlashSettings",
    ),
    "dflash2": Kind(
        "block.head:DFlash2Head",
        "DFlash2: drafts a block in one pass, its tokens chosen in order among the likeliest (z-lab/dflash 2026).",
        "settings:DFlash2Settings",
    ),
    "draft": Kind(
        "draft_model:DraftModelHead",
        "Draft model: some of the target's layers, distilled on its answers (DistillSpec, Zhou et al. 2023).",
        "settings:DraftModelSettings",
    ),
    "dspark": Kind(
        "block.head:DSparkHead",
        "DSpark: drafts a block in one pass, its tokens in order, with a confidence head (deepseek-ai/DeepSpec 2026).",
        "settings:DSparkSettings",
    ),
    "eagle": Kind(
        "eagle:EagleHead",
        "EAGLE head: drafts from the target's own features (Li et al. 2024, both papers).",
        "settings:EagleSettings",
    ),
    "eagle3": Kind(
        "eagle3:Eagle3Head",
        "EAGLE-3: drafts from several layers of the target, trained on its own states (Li et al. 2025).",
        "settings:Eagle3Settings",
    ),
    "mtp": Kind(
        "mtp:MtpHead",
        "MTP: the multi-token-prediction layer that ships with the target (DeepSeek-V3; Qwen3-Next).",
        "settings:MtpSettings",
    ),
}


# The drafter of methods that draft with a language model; others are the kinds of trained drafters.
MODEL = "draft"


def learned() -> dict[str, str]:
    """Return the kind of every trained drafter with its line of help."""
    return {kind: names.help for kind, names in sorted(HEADS.items())}


def head_class(kind: str) -> type[DraftHead]:
    """Import the head of a kind. Raises KeyError for an unknown kind."""
    head: type[DraftHead] = _import(HEADS[kind].head)
    return head


def settings_class(kind: str) -> type[HeadSettings]:
    """Return the class of the options of `train KIND`; it needs no torch, but for a user's own head."""
    names = HEADS[kind]
    settings: type[HeadSettings] = _import(names.settings) if names.settings else head_class(kind).Settings
    return settings


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
