"""Methods in which an EAGLE head drafts a tree a round."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import yaml

from draftsmith.eval.methods.base import Method, Models, at_least, at_most
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.types import InputError

MAX_NODES = 128  # what a session of the target has room for (`modules.decoding.loop.generate`)


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
    except (yaml.YAMLError, TypeError, ValueError) as error:
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

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.heads.eagle import EagleHead
        from draftsmith.modules.heads.eagle_tree import EagleTreeDrafter

        assert isinstance(models.eagle, EagleHead)
        shape = read_tree(self.tree)
        at_most("eagle-tree, ranks", max(shape.ranks) + 1, models.target.info.vocab_size)
        return EagleTreeDrafter(models.eagle, models.target, shape, models.capacity)


@dataclass(frozen=True)
class Eagle2(Method):
    """EAGLE-2's dynamic tree: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    value: off ranks by a node's own confidence. rerank: off keeps the expanded nodes, level by level.
    """

    nodes: int = 60
    depth: int = 6
    topk: int = 10
    value: bool = True
    rerank: bool = True
    uses = ("eagle",)

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "topk"):
            at_least(name, getattr(self, name), 1)
        at_most("nodes", self.nodes, MAX_NODES)
        candidates = self.topk * (1 + self.depth * (self.topk if self.rerank else 1))
        at_most("nodes", self.nodes, candidates)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.heads.eagle import EagleHead
        from draftsmith.modules.heads.eagle_tree import DynamicTree, EagleTreeDrafter

        assert isinstance(models.eagle, EagleHead)
        at_most("topk", self.topk, models.target.info.vocab_size)
        shape = DynamicTree(self.nodes, self.depth, self.topk, self.value, self.rerank)
        return EagleTreeDrafter(models.eagle, models.target, shape, models.capacity)
