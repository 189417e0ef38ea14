"""Random trees of drafted tokens, and the path to a node."""

from __future__ import annotations

import random
from collections.abc import Sequence


def random_tree(rng: random.Random, size: int) -> list[int]:
    """Return the parents of a tree's nodes; -1 is the root."""
    return [rng.randrange(-1, i) for i in range(size)]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root's child down to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
