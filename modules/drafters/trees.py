"""Methods in which an EAGLE head drafts, a chain or a tree a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.growth import DynamicTree
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.tree import MAX_NODES, num_candidates
from draftsmith.modules.drafters.chains import FixedK
from draftsmith.modules.drafters.eagle.drafting import EagleTreeDrafter
from draftsmith.modules.drafters.methods import DynamicTrees, Method, Models
from draftsmith.modules.types import InputError, at_least, at_most

MOST_LEVELS = 8  # expansions of a tree of depth=auto


@dataclass(frozen=True)
class EagleChain(FixedK):
    """An EAGLE head drafts a chain of k tokens a round (Li et al. 2024)."""

    uses = ("eagle",)


@dataclass(frozen=True)
class EagleStaticTree(Method):
    """EAGLE-1's static tree (Li et al. 2024): 25 nodes, or any tree from a YAML list of paths of ranks."""

    tree: str = "eagle-1"
    uses = ("eagle",)

    @property
    def trees(self) -> tuple[str, ...]:
        return (self.tree,)

    def build(self, models: Models, rows: int = 1) -> Drafter:
        shape = models.trees[self.tree]
        at_most("eagle-tree, ranks", max(shape.ranks) + 1, models.target.info.vocab_size)
        return EagleTreeDrafter(models.heads["eagle"], models.target, shape, models.capacity, rows)


@dataclass(frozen=True)
class Eagle2(DynamicTrees):
    """EAGLE-2's dynamic tree: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    value: what nodes are ranked by. on: the product of confidences along the path; off: a node's own confidence; head:
        the product of an acceptance head's probabilities.
    rerank: off keeps the expanded nodes, level by level.
    """

    value: Literal["on", "off", "head"] = "on"
    rerank: bool = True
    uses = ("eagle",)
    predicts = "tree"

    def __post_init__(self) -> None:
        for name, value in (("depth", self.most_depth), ("topk", self.topk)):
            at_least(name, value, 1)
        if self.depth == "auto" and self.nodes != "auto":
            raise InputError("depth", f"auto with nodes={self.nodes}", "nodes=auto with it", "Give a depth.")
        if self.nodes == "auto":
            if self.value == "off" or not self.rerank:
                found = "auto with value=off or rerank=off"
                raise InputError("nodes", found, "values that are probabilities", "Give a number of nodes.")
            return
        at_least("nodes", self.nodes, 1)
        at_most("nodes", self.nodes, MAX_NODES)
        at_most("nodes", self.nodes, self.num_candidates)

    @property
    def num_candidates(self) -> int:
        """Nodes that a tree may be chosen from."""
        if self.rerank:
            return num_candidates(self.topk, self.most_depth + 1)
        return self.topk * (self.most_depth + 1)

    @property
    def most_depth(self) -> int:
        """`depth`, or what auto may take."""
        return MOST_LEVELS if self.depth == "auto" else self.depth

    @property
    def most_nodes(self) -> int:
        """`nodes`, or as many as auto may take."""
        return min(MAX_NODES, self.num_candidates) if self.nodes == "auto" else self.nodes

    @property
    def needs(self) -> tuple[str, ...]:
        return ("eagle", "acceptance") if self.value == "head" else self.uses

    def build(self, models: Models, rows: int = 1) -> Drafter:
        at_most("topk", self.topk, models.target.info.vocab_size)
        if self.nodes != "auto":
            return self._drafter(models, self.most_nodes, self.most_depth, rows)
        trees = f"trees of topk {self.topk}, value {self.value}"
        times = models.times.tree_times(models, trees, lambda levels: self.fixed(models, self.topk, levels))
        rules = [TreeRule(times, self.depth == "auto") for _ in range(rows)]
        return self._drafter(models, self.most_nodes, self.most_depth, rows, rules)

    @property
    def by_values(self) -> bool:
        return self.value != "off" and self.rerank

    def fixed(self, models: Models, nodes: int, depth: int) -> Drafter:
        return self._drafter(models, nodes, depth)

    def _drafter(
        self, models: Models, nodes: int, depth: int, rows: int = 1, rules: Sequence[TreeRule] | None = None
    ) -> Drafter:
        head = tree_head(models) if self.value == "head" else None
        shape = DynamicTree(nodes, depth, self.topk, self.value != "off", self.rerank)
        eagle, target, capacity = models.heads["eagle"], models.target, models.capacity
        return EagleTreeDrafter(eagle, target, shape, capacity, rows, acceptance=head, rules=rules)


def tree_head(models: Models) -> AcceptanceHead:
    """The run's acceptance head, one for trees (`eval.bench.load` sees to that).

    Raises:
        InputError: it reads what nobody has: a node's own state, which only its expansion would give, or the text.
    """
    head = models.acceptance
    assert head is not None and head.config.judges == "tree"
    if head.config.state != "before":
        found, remedy = "a head that reads the state after the token", "Train one with --state before."
        raise InputError("acceptance, value=head", found, "a head that reads the state before it", remedy)
    if "repeat" in head.config.features:
        found, remedy = "a head that looks for repetitions", "Train one with other --features."
        raise InputError("acceptance, value=head", found, "one that does not", remedy)
    return head


METHODS = {"eagle": EagleChain, "eagle-tree": EagleStaticTree, "eagle2": Eagle2}
