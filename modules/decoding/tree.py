"""Shapes of draft trees: EAGLE-1's static ones, and EAGLE-2's choice of the candidates that the target scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Most drafted tokens of a row that the target scores in one call.
MAX_NODES = 128


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

    def level(self, depth: int) -> list[int]:
        """Return the nodes at `depth`; the root's children are at 1."""
        return [i for i, own in enumerate(self.depths) if own == depth]


def num_candidates(topk: int, levels: int) -> int:
    """Count the candidates of EAGLE-2's tree: `topk` children of the root, and of `topk` nodes in every level."""
    return topk * (1 + (levels - 1) * topk) if levels else 0
