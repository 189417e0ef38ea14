"""Methods in which an EAGLE head drafts a tree a round."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from draftsmith.eval.methods.base import Method, Models, at_least, at_most
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.tree import MAX_NODES, StaticTree, num_candidates
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.modules.acceptance.head import AcceptanceHead

MOST_LEVELS = 8  # expansions of a tree of depth=auto


def read_tree(name: str) -> StaticTree:
    """A tree of configs/trees by name, or a YAML file that lists paths of ranks.

    Raises:
        InputError: no such tree, or one that is not a tree.
    """
    shipped = files("draftsmith.configs") / "trees" / f"{name}.yaml"
    source = shipped if shipped.is_file() else Path(name)
    if not source.is_file():
        names = ", ".join(
            sorted(p.name.removesuffix(".yaml") for p in (files("draftsmith.configs") / "trees").iterdir())
        )
        raise InputError("eagle-tree, tree", repr(name), f"a YAML file, or one of: {names}", "Correct the path.")
    try:
        tree = StaticTree.from_paths([[int(rank) for rank in path] for path in yaml.safe_load(source.read_text())])
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            "eagle-tree, tree", f"{name}: {error}", "a list of paths such as [0, 1]", "Correct it."
        ) from error
    at_most("eagle-tree, nodes", len(tree.parents), MAX_NODES)
    return tree


@dataclass(frozen=True)
class EagleStaticTree(Method):
    """EAGLE-1's static tree (Li et al. 2024): 25 nodes, or any tree from a YAML list of paths of ranks."""

    tree: str = "eagle-1"
    uses = ("eagle",)

    def __post_init__(self) -> None:
        read_tree(self.tree)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        from draftsmith.modules.drafters.eagle.drafting import EagleTreeDrafter
        from draftsmith.modules.drafters.eagle.head import EagleHead

        assert isinstance(models.eagle, EagleHead)
        shape = read_tree(self.tree)
        at_most("eagle-tree, ranks", max(shape.ranks) + 1, models.target.info.vocab_size)
        return EagleTreeDrafter(models.eagle, models.target, shape, models.capacity, rows)


@dataclass(frozen=True)
class Eagle2(Method):
    """EAGLE-2's dynamic tree: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    nodes: auto takes as many in every round as are worth their time on this machine, which is measured once.
    depth: auto, with nodes=auto, expands as often in every round as is worth its time.
    value: what nodes are ranked by. on: the product of confidences along the path; off: a node's own confidence; head:
        the product of an acceptance head's probabilities.
    rerank: off keeps the expanded nodes, level by level.
    """

    nodes: int | Literal["auto"] = 60
    depth: int | Literal["auto"] = 6
    topk: int = 10
    value: Literal["on", "off", "head"] = "on"
    rerank: bool = True
    uses = ("eagle",)
    judged = "tree"

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

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        from draftsmith.eval.cost.tree_times import tree_times
        from draftsmith.modules.acceptance.tree_rule import TreeRule
        from draftsmith.modules.decoding.growth import DynamicTree
        from draftsmith.modules.drafters.eagle.drafting import EagleTreeDrafter
        from draftsmith.modules.drafters.eagle.head import EagleHead

        assert isinstance(models.eagle, EagleHead)
        at_most("topk", self.topk, models.target.info.vocab_size)
        judge = tree_judge(models) if self.value == "head" else None
        rules = None
        if self.nodes == "auto":
            rules = [TreeRule(tree_times(models, self), self.depth == "auto") for _ in range(rows)]
        shape = DynamicTree(self.most_nodes, self.most_depth, self.topk, self.value != "off", self.rerank)
        return EagleTreeDrafter(models.eagle, models.target, shape, models.capacity, rows, judge=judge, rules=rules)


def tree_judge(models: Models) -> AcceptanceHead:
    """The run's acceptance head, one that judges trees (`eval.bench.load` sees to that).

    Raises:
        InputError: it reads what nobody has: a node's own state, which only its expansion would give, or the text.
    """
    from draftsmith.modules.acceptance.head import AcceptanceHead

    head = models.acceptance
    assert isinstance(head, AcceptanceHead) and head.config.judges == "tree"
    if head.config.state != "before":
        found, remedy = "a head that reads the state after the token", "Train one with --state before."
        raise InputError("acceptance, value=head", found, "a head that reads the state before it", remedy)
    if "repeat" in head.config.features:
        found, remedy = "a head that looks for repetitions", "Train one with other --features."
        raise InputError("acceptance, value=head", found, "one that does not", remedy)
    return head
