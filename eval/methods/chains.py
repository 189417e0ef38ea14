"""Methods that draft one chain a round: a draft model or an EAGLE head, and a policy that says when to stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftsmith.eval.methods.base import Method, Models, at_least, between
from draftsmith.modules.acceptance.policies import ConfidenceName, Judge, JudgedStop, Rule
from draftsmith.modules.decoding.protocols import Drafter, StopPolicy
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class Autoregressive(Method):
    """One token a target call, by this engine: what every speed-up is measured against."""

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return None


def build_chains(models: Models, drafter: str, stops: Sequence[StopPolicy]) -> Drafter:
    """A chain drafter (`draft` or `eagle`) for as many rows as there are policies, each of which ends its row's drafts,
    as does an end token.

    On a GPU chains of a fixed length go on behind an end token: there the host would have to wait for each token to see
    it, and rows draft beside each other in any case.
    """
    from draftsmith.modules.decoding.stop import FixedLength, UntilEnd

    if models.ends and (models.target.device.type == "cpu" or not all(isinstance(s, FixedLength) for s in stops)):
        stops = [UntilEnd(stop, models.ends) for stop in stops]
    if drafter == "eagle":
        from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
        from draftsmith.modules.drafters.eagle.head import EagleHead

        assert isinstance(models.eagle, EagleHead)
        return EagleDrafter(models.eagle, models.target, stops, models.capacity)
    from draftsmith.modules.drafters.draft_model import DraftModelDrafter

    assert models.draft is not None
    return DraftModelDrafter(models.draft, stops, models.capacity)


@dataclass(frozen=True)
class Chain(Method, ABC):
    """One chain a round, drafted by the first of the models that the method needs."""

    @abstractmethod
    def policy(self, models: Models) -> StopPolicy:
        """A fresh stop policy."""

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return build_chains(models, self.needs[0], [self.policy(models) for _ in range(rows)])


@dataclass(frozen=True)
class FixedK(Chain):
    """Speculative sampling with a draft model (Leviathan et al. 2023): k drafted tokens a round."""

    k: int = 5
    uses = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def policy(self, models: Models) -> StopPolicy:
        from draftsmith.modules.decoding.stop import FixedLength

        return FixedLength(self.k)


@dataclass(frozen=True)
class EagleChain(FixedK):
    """An EAGLE head drafts a chain of k tokens a round (Li et al. 2024)."""

    uses = ("eagle",)


@dataclass(frozen=True)
class StopRule(Chain, ABC):
    """A chain whose length a policy decides.

    drafter: draft for a draft model, eagle for an EAGLE head.
    """

    drafter: Literal["draft", "eagle"] = field(default="draft", kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter,)


@dataclass(frozen=True)
class Judged(StopRule, ABC):
    """A chain that ends by the probabilities that its tokens are accepted: one judge and one rule, whatever is drafted.

    Rows that are decoded together have a policy each, which learns from that row alone: what a row drafts does not
    depend on the rows beside it.
    """

    @property
    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """Fewest and most drafted tokens of a round."""

    @abstractmethod
    def judges(self, models: Models, count: int) -> Sequence[Judge]:
        """One for each row."""

    @abstractmethod
    def rule(self, models: Models, rows: int) -> Rule:
        """rows: that are decoded together."""

    def policies(self, models: Models, rows: int) -> list[JudgedStop]:
        """One for each row."""
        return [JudgedStop(judge, self.rule(models, rows), *self.limits) for judge in self.judges(models, rows)]

    def policy(self, models: Models) -> StopPolicy:
        return self.policies(models, 1)[0]

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return build_chains(models, self.drafter, self.policies(models, rows))


def head_judges(models: Models, drafter: str, calibrated: bool, count: int) -> list[Judge]:
    """By the acceptance head of this drafter."""
    from draftsmith.modules.acceptance.head import AcceptanceHead, HeadJudge

    assert isinstance(models.acceptance, AcceptanceHead)
    reader = models.target if drafter == "eagle" else models.draft
    assert reader is not None
    judge = HeadJudge(models.acceptance, reader.embed, calibrated)
    return [judge, *(judge.beside() for _ in range(count - 1))]


@dataclass(frozen=True)
class SpecDecPlusPlus(Judged):
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
    def limits(self) -> tuple[int, int]:
        return self.min, self.max

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, "acceptance")

    def judges(self, models: Models, count: int) -> Sequence[Judge]:
        return head_judges(models, self.drafter, self.calibrated, count)

    def rule(self, models: Models, rows: int) -> Rule:
        from draftsmith.modules.acceptance.policies import ThresholdRule

        return ThresholdRule(self.h)


@dataclass(frozen=True)
class CostAware(Judged, ABC):
    """Stopped once one more token is worth less than its time, without a threshold (`policies.CostRule`).

    c: time of one more drafted token, and of verifying it, by the time of a round without a draft; auto measures it on
        this machine, once a run.
    """

    c: float | Literal["auto"] = "auto"
    min: int = 1
    max: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.c, str) and not self.c > 0:
            raise InputError("c", self.c, "a number above 0, or auto", "Correct it.")
        at_least("min", self.min, 1)
        at_least("max", self.max, self.min)

    @property
    def limits(self) -> tuple[int, int]:
        return self.min, self.max

    def rule(self, models: Models, rows: int) -> Rule:
        from draftsmith.eval.cost.step_cost import step_cost
        from draftsmith.modules.acceptance.policies import CostRule

        return CostRule(step_cost(models, self.drafter, rows) if isinstance(self.c, str) else self.c)


@dataclass(frozen=True)
class HeadByCost(CostAware):
    """The acceptance head's calibrated probabilities, and the cost of drafting on: no threshold to choose."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, "acceptance")

    def judges(self, models: Models, count: int) -> Sequence[Judge]:
        return head_judges(models, self.drafter, True, count)


@dataclass(frozen=True)
class Online(CostAware):
    """The same without a head: a logistic of the draft's own confidence, which learns from every verdict.

    by: q, the probability of the drafted token; max_q, of the most probable one. repeats: whether the token goes on
        with a repetition of the text counts too.
    """

    by: ConfidenceName = "q"
    repeats: bool = True

    def judges(self, models: Models, count: int) -> Sequence[Judge]:
        from draftsmith.modules.acceptance.policies import OnlineJudge

        return [OnlineJudge(self.by, self.repeats) for _ in range(count)]


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
