"""Draft trees: the drafted tokens of a round, and the shapes that drafters grow them in."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

# Most drafted tokens of a row that the target scores in one call.
MAX_NODES = 128


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens. A chain is the tree with parents -1, 0, 1, ...

    parents: parents[i] < i; -1 is the root, the last emitted token, which the target has not read yet.
    draft_prob: of a drawn chain: the distribution [V] that each of the N tokens was drawn from (after temperature,
        top-k and top-p), also as one tensor [N, V]; None if nodes were chosen deterministically (greedy, top-k
        children, lookups).
    drawn: of a drawn tree: node -> [V], the distribution from which its children were drawn one after the other,
        without replacement.
    values: scores by which nodes were chosen, if any (EAGLE-2: log-probability of the path).
    draft_calls: forward passes of the drafter.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_prob: Tensor | Sequence[Tensor] | None = None
    drawn: Mapping[int, Tensor] | None = None
    values: tuple[float, ...] | None = None
    draft_calls: int = 0

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.tokens))


@functools.cache
def chain_parents(count: int) -> tuple[int, ...]:
    """Return the parents of a chain with this many nodes."""
    return tuple(range(-1, count - 1))


NO_DRAFT = DraftTree((), ())


@dataclass(frozen=True)
class StaticTree:
    """A tree of ranks (EAGLE, section 4.1): node i is the `ranks[i]`-th most probable child of node `parents[i]`.

    Nodes are in level order, so parents come first; parent -1 is the root. drawn: when sampling, node i is instead the
    `ranks[i]`-th child drawn from the drafter's distribution behind its parent, without replacement.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    drawn: bool = False

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> StaticTree:
        """Build a tree from paths of ranks, as SafeAILab writes them: [0, 1] is the second child of the root's first.

        Raises:
            ValueError: no paths, an empty or repeated path, one without its parent, or a negative rank.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        numbers = {path: i for i, path in enumerate(ordered)}
        if not ordered or len(numbers) != len(ordered):
            raise ValueError("a tree needs at least one path, and each path once")
        for path in ordered:
            if not path or min(path) < 0:
                raise ValueError(f"path {list(path)}: expected ranks of 0 or more")
            if len(path) > 1 and path[:-1] not in numbers:
                raise ValueError(f"path {list(path)}: its parent {list(path[:-1])} is not in the tree")
        parents = tuple(numbers.get(path[:-1], -1) for path in ordered)
        return cls(parents, tuple(path[-1] for path in ordered), tuple(len(path) for path in ordered))

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @property
    def slots(self) -> int:
        """Most nodes that a drafter reads."""
        return len(self.parents)

    def level(self, depth: int) -> list[int]:
        """Return the nodes at `depth`; the root's children are at 1."""
        return [i for i, own in enumerate(self.depths) if own == depth]


@dataclass(frozen=True)
class DynamicTree:
    """Shape of EAGLE-2's trees (section 4).

    The `topk` best nodes of a level are expanded, `depth` times; the target scores the `nodes` best of all candidates.
    A node is worth the product of the confidences along its path.
    """

    nodes: int = 60
    depth: int = 6
    topk: int = 10

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        return self.depth + 1

    @property
    def slots(self) -> int:
        """Most nodes that a drafter reads."""
        return self.depth * self.topk


def num_candidates(topk: int, levels: int) -> int:
    """Count the candidates of EAGLE-2's tree: `topk` children of the root, and of `topk` nodes in every level."""
    return topk * (1 + (levels - 1) * topk) if levels else 0
