"""Rollouts of a study: recorded once, then read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.data.progress import bar
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import ChainRecorder, Recording, TargetAnswers
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.replay.store import recorded
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.methods import Models


def recorded_chains(
    directory: Path,
    models: Models,
    drafter: str,
    prompts: Sequence[BenchPrompt],
    how: Recording,
    heads: Mapping[str, AcceptanceHead],
    together: bool = False,
    answers: TargetAnswers | None = None,
    along: bool = False,
) -> ChainRollouts:
    """Chains of every prompt with the logits of all heads: those in `directory` are read, the others recorded there.

    together: `along` and `side_by_side` of `ChainRecorder`. answers, along: of it too.

    Raises:
        InputError: the directory holds rollouts that were made otherwise.
    """
    settings: dict[str, Any] = {
        **dataclasses.asdict(how),
        "drafter": drafter,
        "models": {flag: lm.info.identity for flag, lm in (("target", models.target), ("draft", models.draft)) if lm},
        "heads": {name: digest(head) for name, head in heads.items()},
    }
    if models.ends:
        settings["ends"] = list(models.ends)
    if together:
        settings["together"] = True
    elif along:
        settings["along"] = True
    if drafter != "draft":
        settings["models"][drafter] = digest(models.heads[drafter])
    recorder = ChainRecorder(models, drafter, how, heads, answers, along=together or along, side_by_side=together)
    with bar(f"rollouts, {directory.name}", len(prompts), "prompts") as advance:
        return recorded(directory, prompts, settings, recorder, advance)


def digest(head: nn.Module) -> str:
    """Of a head's weights."""
    values = hashlib.sha256()
    for tensor in head.parameters():
        values.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return values.hexdigest()[:16]
