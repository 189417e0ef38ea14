"""transformers' own decoding: baselines that share no code with this engine (`eval/hf_baseline.py` runs them)."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.eval.methods.base import Method, at_least


@dataclass(frozen=True)
class HFGenerate(Method):
    """transformers' own `generate`: a baseline that shares no code with this engine."""


@dataclass(frozen=True)
class HFAssisted(Method):
    """transformers' assisted generation with the draft model, a constant k drafted tokens a round."""

    k: int = 5
    uses = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
