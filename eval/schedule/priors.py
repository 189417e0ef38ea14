"""Priors for vLLM's plugin, by rounds that a bench traced: how likely a drafted token is to be accepted, by what was
known before it was drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.store.reading import read_lines
from draftsmith.eval.bench.trace import TRACE
from draftsmith.modules.acceptance.served import NUM_FEATURES, fit_priors

SHAPE = {
    "method": str,
    "temperature": float,
    **dict.fromkeys(("num_drafted?", "num_accepted?"), int),
    "undrawn?": [[float]],  # earlier versions have none
}


def read_priors(run: Path, method: str, temperature: float) -> dict[str, Any] | None:
    """The fields of `Start`, as the plugin reads them; None where the run traced no round of this method.

    Raises:
        InputError: its traces are damaged.
    """
    path = run / TRACE
    if not path.exists():
        return None
    rounds = [
        line
        for line in read_lines(path, SHAPE, "Measure it again.")
        if line["method"] == method and line["temperature"] == temperature and line.get("undrawn")
    ]
    return fitted(rounds) if rounds else None


def fitted(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By lines of a trace; shorter drafts have no verdict on their last places."""
    longest = max(len(line["undrawn"]) for line in rounds)
    features = torch.zeros(len(rounds), longest, NUM_FEATURES)
    for row, line in enumerate(rounds):
        features[row, : len(line["undrawn"])] = torch.tensor(line["undrawn"])
    accepted, drafted = (torch.tensor([line[f"num_{what}"] for line in rounds]) for what in ("accepted", "drafted"))
    return dataclasses.asdict(fit_priors(features, accepted, drafted))
