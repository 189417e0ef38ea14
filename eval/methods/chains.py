"""Methods that draft one chain a round: a draft model or an EAGLE head, and a policy that says when to stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from draftsmith.eval.methods.base import Method, Models, at_least, between
from draftsmith.modules.decoding.protocols import Drafter, StopPolicy


@dataclass(frozen=True)
class Autoregressive(Method):
    """One token a target call, by this engine: what every speed-up is measured against."""

    def build(self, models: Models) -> Drafter | None:
        return None


def build_chain(models: Models, drafter: str, stop: StopPolicy) -> Drafter:
    """A chain drafter (`draft` or `eagle`) that stops when the policy says so."""
    if drafter == "eagle":
        from draftsmith.modules.heads.eagle import EagleDrafter, EagleHead

        assert isinstance(models.eagle, EagleHead)
        return EagleDrafter(models.eagle, models.target, stop, models.capacity)
    from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter

    assert models.draft is not None
    return DraftModelDrafter(models.draft, stop, models.capacity)


@dataclass(frozen=True)
class FixedK(Method):
    """Speculative sampling with a draft model (Leviathan et al. 2023): k drafted tokens a round."""

    k: int = 5
    uses = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.decoding.stop import FixedLength

        return build_chain(models, "draft", FixedLength(self.k))


@dataclass(frozen=True)
class EagleChain(Method):
    """An EAGLE head drafts a chain of k tokens a round (Li et al. 2024)."""

    k: int = 5
    uses = ("eagle",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.decoding.stop import FixedLength

        return build_chain(models, "eagle", FixedLength(self.k))


@dataclass(frozen=True)
class StopRule(Method, ABC):
    """A chain whose length a policy decides.

    drafter: draft for a draft model, eagle for an EAGLE head.
    """

    drafter: Literal["draft", "eagle"] = field(default="draft", kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter,)

    @abstractmethod
    def policy(self, models: Models) -> StopPolicy:
        """A fresh stop policy."""

    def build(self, models: Models) -> Drafter | None:
        return build_chain(models, self.drafter, self.policy(models))


@dataclass(frozen=True)
class SpecDecPlusPlus(StopRule):
    """SpecDec++: stopped by the acceptance head once 1 - (product of its outputs) > h.

    calibrated: off applies h to the head's raw output, as the paper does; on to its calibrated probability.
    """

    h: float = 0.7
    min: int = 2
    max: int = 20
    calibrated: bool = False

    def __post_init__(self) -> None:
        between("h", self.h, 0, 1)
        at_least("min", self.min, 1)
        at_least("max", self.max, self.min)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, "acceptance")

    def policy(self, models: Models) -> StopPolicy:
        from draftsmith.modules.heads.acceptance import AcceptanceHead, SpecDecPP

        assert isinstance(models.acceptance, AcceptanceHead)
        return SpecDecPP(models.acceptance, self.h, self.min, self.max, calibrated=self.calibrated)


@dataclass(frozen=True)
class ConfidenceStop(StopRule):
    """Stopped once the drafted token's probability q falls below t, as in transformers' assisted generation."""

    t: float = 0.4
    min: int = 1
    max: int = 20

    def __post_init__(self) -> None:
        between("t", self.t, 0, 1)
        at_least("min", self.min, 1)
        at_least("max", self.max, self.min)

    def policy(self, models: Models) -> StopPolicy:
        from draftsmith.modules.decoding.stop import Confidence

        return Confidence(self.t, self.min, self.max)


@dataclass(frozen=True)
class SelfVerification(StopRule):
    """HSDDW's self-verification: stopped once the draft's entropy exceeds its mean at rejected tokens; at most k."""

    k: int = 10

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def policy(self, models: Models) -> StopPolicy:
        from draftsmith.modules.decoding.stop import SelfVerify

        return SelfVerify(self.k)
