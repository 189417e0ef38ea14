"""Methods that draft one tree a round with any trained drafter that drafts trees (`DraftHead.tree_drafter`)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.tree import MAX_NODES, DynamicTree, num_candidates
from draftsmith.modules.drafters.methods import Method, Models
from draftsmith.modules.types import InputError, at_least, at_most

# Expansions of a tree with depth=auto.
MOST_LEVELS = 8


@dataclass(frozen=True)
class StaticTrees(Method, ABC):
    """The same tree of ranks in every round: 25 nodes of EAGLE-1, or any tree from a YAML list of paths of ranks.

    drawn: when sampling, draw a node's children without replacement, in place of the likeliest ones.
    """

    tree: str = "eagle-1"
    drawn: bool = False

    @property
    def trees(self) -> tuple[str, ...]:
        return (self.tree,)

    def build(self, models: Models, rows: int = 1) -> Drafter:
        shape, (kind,) = models.trees[self.tree], self.uses
        at_most(f"tree {self.tree}, ranks", max(shape.ranks) + 1, models.target.info.vocab_size)
        shape = replace(shape, drawn=self.drawn)
        return models.heads[kind].tree_drafter(models.target, shape, models.capacity, rows)


@dataclass(frozen=True)
class DynamicTrees(Method, ABC):
    """EAGLE-2's trees: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    nodes: drafted tokens; SafeAILab's total_token counts the root too, so that its 60 is 59 here. auto takes as many in
        every round as are worth their time on this machine, which is measured once.
    depth: 6 gives 7 levels, as in SafeAILab's code. auto, with nodes=auto, expands as often in every round as is worth
        its time.
    """

    nodes: int | Literal["auto"] = 60
    depth: int | Literal["auto"] = 6
    topk: int = 10

    def __post_init__(self) -> None:
        at_least("depth", self.most_depth, 1)
        at_least("topk", self.topk, 1)
        if self.depth == "auto" and self.nodes != "auto":
            raise InputError("depth", f"auto with nodes={self.nodes}", "nodes=auto with it", "Give a depth.")
        if self.nodes != "auto":
            at_least("nodes", self.nodes, 1)
            at_most("nodes", self.nodes, self.most_nodes)

    @property
    def most_depth(self) -> int:
        """`depth`, or the most that auto takes."""
        return MOST_LEVELS if self.depth == "auto" else self.depth

    @property
    def most_nodes(self) -> int:
        """Number of nodes that a tree is chosen from, or the most that the target scores."""
        return min(MAX_NODES, num_candidates(self.topk, self.most_depth + 1))

    def build(self, models: Models, rows: int = 1) -> Drafter:
        if self.nodes != "auto":
            return self.fixed(models, self.nodes, self.most_depth, rows)
        trees = f"trees of topk {self.topk}"
        times = models.times.tree_times(models, trees, lambda levels: self.fixed(models, self.topk, levels))
        rules = [TreeRule(times, self.depth == "auto") for _ in range(rows)]
        return self.fixed(models, self.most_nodes, self.most_depth, rows, rules)

    def fixed(
        self, models: Models, nodes: int, depth: int, rows: int = 1, rules: Sequence[TreeRule] | None = None
    ) -> Drafter:
        """Build the drafter of trees of at most this size, whatever `nodes` and `depth` are."""
        at_most("topk", self.topk, models.target.info.vocab_size)
        shape = DynamicTree(nodes, depth, self.topk)
        head = models.heads[self.uses[0]]
        return head.tree_drafter(models.target, shape, models.capacity, rows, rules)
