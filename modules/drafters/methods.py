"""Decoding methods of draft models and trained drafters: chains with their stop rules, and trees.

A method is a frozen dataclass; its fields are the settings that users write behind its name (method_names.py). The kind
of a trained drafter names its chains, KIND-tree its dynamic trees and KIND-static its static ones: `DraftHead.drafts`
lists which it drafts, and HEADS which heads there are. `eagle3:k=5` is `spec:k=5:drafter=eagle3`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from draftsmith.modules import drafters
from draftsmith.modules.acceptance.head import HeadPredictor
from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.stop import (
    ConfidenceStop,
    CostRule,
    FixedLengthStop,
    Predictor,
    PredictorStop,
    SelfVerifyStop,
    SlotConfidenceStop,
    StopPolicy,
    ThresholdRule,
)
from draftsmith.modules.decoding.tree import MAX_NODES, DynamicTree, num_candidates
from draftsmith.modules.drafters import MODEL, hierarchical, prompt_lookup
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.types import InputError, Range, check_range

# -- chains


@dataclass(frozen=True)
class AutoregressiveMethod(Method):
    """One token a target call: the baseline of every speed-up."""

    def build(self, models: Models) -> Drafter | None:
        return None


@dataclass(frozen=True)
class DraftingMethod(Method, ABC):
    """A method of a draft model or a trained drafter.

    drafter: draft for a draft model, or the kind of a trained drafter. The methods of a kind have its own.
    """

    drafter: str = field(default=MODEL, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, *self.uses)


@dataclass(frozen=True)
class ChainMethod(DraftingMethod, ABC):
    """One chain a round, which a policy ends."""

    def __post_init__(self) -> None:
        if self.drafter not in chain_drafters():
            raise InputError("drafter", repr(self.drafter), f"one of {', '.join(chain_drafters())}", "Choose one.")
        super().__post_init__()

    @abstractmethod
    def policy(self, models: Models) -> StopPolicy:
        """Make a new policy."""

    def build(self, models: Models) -> ChainDrafter:
        return build_chains(models, self.drafter, self.policy(models))


def chain_drafters() -> list[str]:
    """Return everything that drafts chains: `draft`, and kinds of trained drafters."""
    return [MODEL, *(kind for kind in drafters.HEADS if "chain" in drafters.head_class(kind).drafts)]


def chain_method(drafter: str) -> str:
    """Return the name of the method that drafts chains of a fixed length with a drafter."""
    return "spec" if drafter == MODEL else drafter


def by_drafter(name: str) -> str:
    """Return the setting that names the drafter, to follow the name of a stop rule."""
    return "" if name == MODEL else f":drafter={name}"


def build_chains(models: Models, drafter: str, stop: StopPolicy) -> ChainDrafter:
    """Build a drafter of chains. drafter: see `chain_drafters`."""
    return ChainDrafter(models.net(drafter), stop, models.capacity, frozenset(models.ends))


@dataclass(frozen=True)
class FixedLengthMethod(ChainMethod):
    """Speculative sampling (Leviathan et al. 2023): k drafted tokens a round.

    k: 5, or the drafter's own default (`DraftHead.default_k`), or fewer where a head drafts no more.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("k", self.k, 1)

    @property
    def length(self) -> int:
        """`k`, or its default."""
        if self.k is not None:
            return self.k
        return 5 if self.drafter == MODEL else drafters.head_class(self.drafter).default_k

    def policy(self, models: Models) -> StopPolicy:
        length = self.length
        if self.drafter != MODEL:
            longest = models.heads[self.drafter].longest_draft
            check_range("k", self.k, high=longest)
            length = min(length, longest)
        return FixedLengthStop(length)


@dataclass(frozen=True)
class BoundedMethod(ChainMethod, ABC):
    """At least min, at most max drafted tokens a round."""

    min: int = 1
    max: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min", self.min, 1)
        check_range("max", self.max, self.min)


@dataclass(frozen=True)
class SpecDecPlusPlusMethod(BoundedMethod):
    """SpecDec++: stopped by the acceptance head once 1 - (product of its outputs) > h.

    min: 2 or more make a difference: the head speaks of a token after the next one is drafted.
    calibrated: off applies h to the head's raw output, as the paper does; on to its calibrated probability.
    """

    h: float = 0.7
    min: int = 2
    calibrated: bool = False
    uses = ("acceptance",)
    ranges: ClassVar = {"h": (0.0, 1.0, "()")}

    def policy(self, models: Models) -> StopPolicy:
        assert models.acceptance is not None
        predictor = HeadPredictor(models.acceptance, self.calibrated)
        return PredictorStop(predictor, ThresholdRule(self.h), self.min, self.max)


# Of the time of one more drafted token, and of verifying it, by the time of a round without a draft; auto measures it
# on this machine, once a run.
COST: dict[str, Range] = {"c": (0.0, math.inf, "()")}


@dataclass(frozen=True)
class CostMethod(BoundedMethod):
    """Stopped once one more token is worth less than its time (`stop.CostRule`), by the acceptance head's calibrated
    probabilities: no threshold to choose.

    c: see `COST`.
    """

    c: float | Literal["auto"] = "auto"
    max: int = 16
    uses: ClassVar[tuple[str, ...]] = ("acceptance",)
    ranges: ClassVar = COST

    def predictor(self, models: Models) -> Predictor:
        """Make a predictor of acceptance."""
        assert models.acceptance is not None
        return HeadPredictor(models.acceptance)

    def policy(self, models: Models) -> StopPolicy:
        c = models.times.step_cost(models, self.drafter) if isinstance(self.c, str) else self.c
        return PredictorStop(self.predictor(models), CostRule(c), self.min, self.max)


@dataclass(frozen=True)
class OnlineMethod(CostMethod):
    """Stopped by cost without a head: a logistic regression on the draft's own confidence predicts acceptance, and is
    updated after every verification.

    Whether the token continues a repetition of the text counts too.
    """

    uses = ()

    def predictor(self, models: Models) -> Predictor:
        return OnlinePredictor()


@dataclass(frozen=True)
class ConfidenceMethod(BoundedMethod):
    """Stopped once the drafted token's probability q falls below t, as in transformers' assisted generation."""

    t: float = 0.4
    ranges: ClassVar = {"t": (0.0, 1.0, "()")}

    def policy(self, models: Models) -> StopPolicy:
        return ConfidenceStop(self.t, self.min, self.max)


@dataclass(frozen=True)
class SelfVerifyMethod(ChainMethod):
    """HSDDW's self-verification: stopped once the draft's entropy exceeds its mean at rejected tokens; at most k."""

    k: int = 10
    ranges: ClassVar = {"k": 1}

    def policy(self, models: Models) -> StopPolicy:
        return SelfVerifyStop(self.k)


@dataclass(frozen=True)
class SlotConfidenceMethod(ChainMethod):
    """A block drafter's chain of at most k tokens, cut before the first one whose confidence is below t."""

    k: int = 7
    t: float = 0.5
    ranges: ClassVar = {"k": 1, "t": (0.0, 1.0, "()")}

    def policy(self, models: Models) -> StopPolicy:
        head = models.heads[self.drafter]
        check_range("k", self.k, high=head.longest_draft)
        if not head.config.confidence:
            raise InputError("methods", "a DSpark head without confidences", "one with", "Train it with --confidence.")
        return SlotConfidenceStop(self.t, self.k)


# -- trees of a trained drafter


@dataclass(frozen=True)
class StaticTreeMethod(DraftingMethod):
    """The same tree of ranks in every round: 25 nodes of EAGLE-1, or any tree from a YAML list of paths of ranks.

    drawn: when sampling, draw a node's children without replacement, in place of the likeliest ones.
    """

    tree: str = "eagle-1"
    drawn: bool = False

    @property
    def trees(self) -> tuple[str, ...]:
        return (self.tree,)

    def build(self, models: Models) -> Drafter:
        shape = replace(models.trees[self.tree], drawn=self.drawn)
        check_range(f"tree {self.tree}, ranks", max(shape.ranks) + 1, high=models.target.info.vocab_size)
        return TreeDrafter(models.net(self.drafter), shape, models.capacity)


@dataclass(frozen=True)
class DynamicTreeMethod(DraftingMethod):
    """EAGLE-2's trees: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    nodes: drafted tokens; SafeAILab's total_token counts the root too, so that its 60 is 59 here.
    depth: 6 gives 7 levels, as in SafeAILab's code.
    """

    nodes: int = 60
    depth: int = 6
    topk: int = 10
    ranges: ClassVar = {"depth": 1, "topk": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("nodes", self.nodes, 1, min(MAX_NODES, num_candidates(self.topk, self.depth + 1)))

    def build(self, models: Models) -> Drafter:
        check_range("topk", self.topk, high=models.target.info.vocab_size)
        shape = DynamicTree(self.nodes, self.depth, self.topk)
        return TreeDrafter(models.net(self.drafter), shape, models.capacity)


# -- by name

# With their default settings.
METHODS: dict[str, Method] = {
    "ar": AutoregressiveMethod(),
    "spec": FixedLengthMethod(),
    "specdec++": SpecDecPlusPlusMethod(),
    "cost": CostMethod(),
    "online": OnlineMethod(),
    "confidence": ConfidenceMethod(),
    "self-verify": SelfVerifyMethod(),
    **hierarchical.METHODS,
    **prompt_lookup.METHODS,
}
# What a trained drafter may draft (`DraftHead.drafts`): the end of the method's name behind its kind, and the method.
OF_HEADS: dict[str, tuple[str, type[DraftingMethod]]] = {
    "chain": ("", FixedLengthMethod),
    "tree": ("-tree", DynamicTreeMethod),
    "static": ("-static", StaticTreeMethod),
    "confidence": ("-confidence", SlotConfidenceMethod),
}


def methods_of(kind: str) -> dict[str, Method]:
    """Return the methods of a kind of trained drafter by name."""
    own = [OF_HEADS[draft] for draft in drafters.head_class(kind).drafts]
    return {f"{kind}{end}": method(drafter=kind) for end, method in own}
