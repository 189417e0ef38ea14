"""Rollouts of a study: recorded once, then read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods.base import Models
from draftsmith.eval.rollouts import record, store
from draftsmith.eval.rollouts.rollouts import ChainRollouts
from draftsmith.modules.heads.acceptance import AcceptanceHead
from draftsmith.modules.types import SamplingParams


def recorded_chains(
    directory: Path,
    models: Models,
    drafter: Literal["draft", "eagle"],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    depth: int,
    max_new_tokens: int,
    seed: int,
    heads: Mapping[str, AcceptanceHead],
) -> ChainRollouts:
    """Those in `directory`, where they are complete; else recorded and kept there. Answers end at the target's end
    tokens."""
    raise AssertionError
