"""Methods that draft one chain a round: a draft model or a trained drafter, and a policy that decides when to stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.stop import (
    ConfidenceStop,
    CostRule,
    FixedLengthStop,
    Predictor,
    PredictorStop,
    SelfVerifyStop,
    StopPolicy,
    ThresholdRule,
)
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.methods import Method, Models, known_methods
from draftsmith.modules.drafters.net import ChainDrafter, DraftNet
from draftsmith.modules.types import InputError, at_least, between


def build_chains(models: Models, drafter: str, stops: Sequence[StopPolicy]) -> ChainDrafter:
    """Build a drafter of chains for as many rows as there are policies.

    drafter: `draft`, or the kind of a trained drafter.
    """
    if drafter == "draft":
        assert models.draft is not None
        net: DraftNet = DraftModelNet(models.draft)
    else:
        net = models.heads[drafter].net(models.target)
    return ChainDrafter(net, stops, models.capacity, frozenset(models.ends))


def chain_methods() -> dict[str, str]:
    """Return the method of a fixed length for everything that drafts chains: {draft: spec, ...}."""
    methods = {method.uses[0]: name for name, method in known_methods().items() if issubclass(method, FixedK)}
    return {"draft": methods.pop("draft"), **methods}


def by_drafter(name: str) -> str:
    """Return the setting that names the drafter, to follow the name of a stop rule."""
    return "" if name == "draft" else f":drafter={name}"


def check_drafter(name: str) -> None:
    """Raise InputError if nothing of this name drafts chains."""
    if name not in chain_methods():
        raise InputError("drafter", repr(name), f"one of {', '.join(chain_methods())}", "Choose one of these.")


@dataclass(frozen=True)
class Chain(Method, ABC):
    """One chain a round, drafted by the first model that the method needs.

    Rows that are decoded together have a policy each, which learns from that row alone: a row's drafts do not depend on
    the rows beside it.
    """

    @abstractmethod
    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        """Make a new policy for each row."""

    def build(self, models: Models, rows: int = 1) -> ChainDrafter:
        return build_chains(models, self.needs[0], self.policies(models, rows))


@dataclass(frozen=True)
class FixedK(Chain):
    """Speculative sampling with a draft model (Leviathan et al. 2023): k drafted tokens a round."""

    k: int = 5
    uses = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        return [FixedLengthStop(self.k) for _ in range(rows)]


@dataclass(frozen=True)
class StopRule(Chain, ABC):
    """A chain whose length a policy decides.

    drafter: draft for a draft model, or the kind of a trained drafter.
    """

    drafter: str = field(default="draft", kw_only=True)

    def __post_init__(self) -> None:
        check_drafter(self.drafter)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, *self.uses)


@dataclass(frozen=True)
class Bounded(StopRule, ABC):
    """At least min, at most max drafted tokens a round."""

    min: int = 1
    max: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("min", self.min, 1)
        at_least("max", self.max, self.min)


def head_predictors(models: Models, drafter: str, count: int, calibrated: bool) -> Sequence[HeadPredictor]:
    """Make predictors of the drafter's acceptance head. calibrated: its probability; else its raw output."""
    assert models.acceptance is not None
    first = HeadPredictor(models.acceptance, models.embedder(drafter).embed, calibrated)
    return [first, *(first.for_row() for _ in range(count - 1))]


@dataclass(frozen=True)
class SpecDecPlusPlus(Bounded):
    """SpecDec++: stopped by the acceptance head once 1 - (product of its outputs) > h.

    min: of heads of state `before`; a published head speaks of a token after the next one is drafted, so that its
        drafts have two tokens or more.
    calibrated: off applies h to the head's raw output, as the paper does; on to its calibrated probability.
    """

    h: float = 0.7
    min: int = 2
    calibrated: bool = False
    uses = ("acceptance",)

    def __post_init__(self) -> None:
        super().__post_init__()
        between("h", self.h, 0, 1)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        predictors = head_predictors(models, self.drafter, rows, self.calibrated)
        return [PredictorStop(predictor, ThresholdRule(self.h), self.min, self.max) for predictor in predictors]


@dataclass(frozen=True)
class CostAware(Bounded, ABC):
    """Stopped once one more token is worth less than its time, without a threshold (`stop.CostRule`).

    c: time of one more drafted token, and of verifying it, by the time of a round without a draft; auto measures it on
        this machine, once a run.
    """

    c: float | Literal["auto"] = "auto"
    max: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.c, str) and not self.c > 0:
            raise InputError("c", self.c, "a number above 0, or auto", "Correct it.")

    @abstractmethod
    def predictors(self, models: Models, count: int) -> Sequence[Predictor]:
        """Make a predictor of acceptance for each row."""

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        c = models.times.step_cost(models, self.drafter, rows) if isinstance(self.c, str) else self.c
        predictors = self.predictors(models, rows)
        return [PredictorStop(predictor, CostRule(c), self.min, self.max) for predictor in predictors]


@dataclass(frozen=True)
class HeadByCost(CostAware):
    """The acceptance head's calibrated probabilities, and the cost of one more token: no threshold to choose."""

    uses = ("acceptance",)

    def predictors(self, models: Models, count: int) -> Sequence[Predictor]:
        return head_predictors(models, self.drafter, count, calibrated=True)


@dataclass(frozen=True)
class Online(CostAware):
    """The same without a head: a logistic regression of the draft's own confidence, which learns from every verdict.

    Whether the token continues a repetition of the text counts too. head: the acceptance head's output counts too, and
        alone until enough verdicts say otherwise.
    """

    head: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, "acceptance") if self.head else (self.drafter,)

    def predictors(self, models: Models, count: int) -> Sequence[Predictor]:
        heads = head_predictors(models, self.drafter, count, calibrated=True) if self.head else [None] * count
        return [OnlinePredictor(head) for head in heads]


@dataclass(frozen=True)
class ConfidenceMethod(Bounded):
    """Stopped once the drafted token's probability q falls below t, as in transformers' assisted generation."""

    t: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        between("t", self.t, 0, 1)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        return [ConfidenceStop(self.t, self.min, self.max) for _ in range(rows)]


@dataclass(frozen=True)
class SelfVerification(StopRule):
    """HSDDW's self-verification: stopped once the draft's entropy exceeds its mean at rejected tokens; at most k."""

    k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("k", self.k, 1)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        return [SelfVerifyStop(self.k) for _ in range(rows)]


METHODS = {
    "spec": FixedK,
    "specdec++": SpecDecPlusPlus,
    "cost": HeadByCost,
    "online": Online,
    "confidence": ConfidenceMethod,
    "self-verify": SelfVerification,
}
