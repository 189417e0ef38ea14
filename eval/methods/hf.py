"""transformers' own decoding: baselines that share no code with this engine (`eval/bench/hf_baseline.py` runs them)."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.eval.methods.base import Method, at_least
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class HFGenerate(Method):
    """transformers' own `generate`: a baseline that shares no code with this engine."""

    batchable = False


@dataclass(frozen=True)
class HFAssisted(Method):
    """transformers' assisted generation with the draft model: at most k drafted tokens a round.

    t: a round ends early after a drafted token of probability below t; 0 drafts all k. Where scikit-learn is installed
        transformers moves a t above 0 in every round, by what was accepted so far in the same answer.
    """

    k: int = 5
    t: float = 0.0
    uses = ("draft",)
    batchable = False

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        if not 0 <= self.t < 1:
            raise InputError("t", self.t, "0 (off) or a probability below 1", "Correct it.")
