"""Methods that draft with a block drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.modules.decoding.stop import CostRule, SlotConfidenceStop, StopPolicy
from draftsmith.modules.drafters.chains import Chain, FixedK
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.drafters.trees import DynamicTrees, StaticTrees
from draftsmith.modules.types import InputError, at_least, at_most, between


@dataclass(frozen=True)
class BlockChain(FixedK):
    """A block drafter drafts a chain of k tokens a round, from a block of as many slots as that takes.

    k is at most the length of the blocks that it was trained on.
    """

    k: int = 7

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        (kind,) = self.uses
        at_most("k", self.k, models.heads[kind].config.drafts)
        return super().policies(models, rows)


@dataclass(frozen=True)
class DFlashChain(BlockChain):
    """A DFlash head drafts a chain of k tokens in one pass (Chen et al. 2026)."""

    uses = ("dflash",)


@dataclass(frozen=True)
class DSparkChain(BlockChain):
    """A DSpark head drafts a chain of k tokens in one pass (deepseek-ai/DeepSpec 2026)."""

    uses = ("dspark",)


@dataclass(frozen=True)
class DSparkConfidence(Chain):
    """A DSpark head's chain of at most k tokens, cut before the first whose confidence is below t, as servers do.

    rule: token, its own confidence, as in llama.cpp; draft, the product of the confidences so far.
    """

    k: int = 7
    t: float = 0.5
    rule: Literal["token", "draft"] = "token"
    uses = ("dspark",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        between("t", self.t, 0, 1)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        check_confident(models, self.k)
        return [SlotConfidenceStop(self.t, self.rule == "draft", self.k) for _ in range(rows)]


@dataclass(frozen=True)
class DSparkCost(Chain):
    """A DSpark head's chain of at most k tokens, cut where one more is worth less than its time, by its confidences.

    c: as of `cost`; auto measures it on this machine, once a run.
    """

    k: int = 7
    c: float | Literal["auto"] = "auto"
    uses = ("dspark",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        if not isinstance(self.c, str) and not self.c > 0:
            raise InputError("c", self.c, "a number above 0, or auto", "Correct it.")

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        check_confident(models, self.k)
        c = models.times.step_cost(models, "dspark", rows) if isinstance(self.c, str) else self.c
        return [SlotConfidenceStop(CostRule(c), True, self.k) for _ in range(rows)]


def check_confident(models: Models, k: int) -> None:
    """Raise InputError if the DSpark head has no confidence head, or drafts fewer than k tokens."""
    config = models.heads["dspark"].config
    at_most("k", k, config.drafts)
    if not config.confidence:
        raise InputError("methods", "a DSpark head without confidences", "one with", "Train it with --confidence.")


@dataclass(frozen=True)
class DFlashTree(DynamicTrees):
    """A DFlash head drafts EAGLE-2's dynamic trees; a node's children are the same as its siblings'."""

    uses = ("dflash",)


@dataclass(frozen=True)
class DSparkTree(DynamicTrees):
    """A DSpark head drafts EAGLE-2's dynamic trees from one pass: its Markov head tells a node's children."""

    uses = ("dspark",)


@dataclass(frozen=True)
class DFlashStaticTree(StaticTrees):
    """A DFlash head drafts EAGLE-1's static tree, or any from a YAML list of paths of ranks."""

    uses = ("dflash",)


@dataclass(frozen=True)
class DSparkStaticTree(StaticTrees):
    """A DSpark head drafts EAGLE-1's static tree, or any from a YAML list of paths of ranks."""

    uses = ("dspark",)


METHODS = {
    "dflash": DFlashChain,
    "dspark": DSparkChain,
    "dspark-confidence": DSparkConfidence,
    "dspark-cost": DSparkCost,
    "dflash-tree": DFlashTree,
    "dspark-tree": DSparkTree,
    "dflash-static": DFlashStaticTree,
    "dspark-static": DSparkStaticTree,
}
