"""Shapes of draft trees, against brute force and the published static tree."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.eval.bench.runner import read_tree
from draftsmith.modules.decoding.tree import DraftTree, StaticTree
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.sampling import Sampler
from draftsmith.modules.types import SamplingParams


def test_eagle_1s_tree_has_the_published_shape():
    tree = read_tree("eagle-1")
    assert len(tree.parents) == 25
    assert Counter(tree.depths) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}


def test_paths_become_parents_in_level_order():
    tree = StaticTree.from_paths([[0, 1], [1], [0], [0, 1, 0]])
    assert tree.parents == (-1, -1, 0, 2) and tree.ranks == (0, 1, 1, 0) and tree.level(2) == [2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [([], "at least one"), ([[0], [0]], "each path once"), ([[]], "0 or more"), ([[-1]], "0 or more"),
     ([[0], [1, 0]], r"parent \[1\]")],
)  # fmt: skip
def test_what_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.from_paths(paths)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_tree_of_paths_is_these_paths(leaves, random):
    paths = sorted({tuple(leaf[:end]) for leaf in leaves for end in range(1, len(leaf) + 1)})
    random.shuffle(paths)
    tree = StaticTree.from_paths(paths)
    rebuilt: list[tuple[int, ...]] = []
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        assert -1 <= parent < node
        rebuilt.append((*(() if parent < 0 else rebuilt[parent]), rank))
    assert sorted(rebuilt) == sorted(paths)
    assert [len(path) for path in rebuilt] == list(tree.depths) == sorted(tree.depths)
    assert [node for depth in range(1, 5) for node in tree.level(depth)] == list(range(len(rebuilt)))


@st.composite
def drafted_trees(draw):
    """Nodes of two tokens, so that siblings are often equal, and the target's choice after every node."""
    size = draw(st.integers(1, 9))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    tokens = tuple(draw(st.integers(0, 1)) for _ in range(size))
    return DraftTree(tokens, parents), [draw(st.integers(0, 1)) for _ in range(size + 1)]


class Chooses:
    """A source whose draws are the only token that has mass, as the distributions below are certain."""

    def draw(self, probs):
        assert sorted(probs.tolist()) == [0.0, 1.0]
        return int(probs.argmax())


@given(drafted_trees(), st.sampled_from([0.0, 1.0]))
@settings(max_examples=300, deadline=None)
def test_the_walk_follows_the_targets_choices_to_where_no_node_has_them(case, temperature):
    tree, choices = case
    # Certain distributions, so that sampling walks as greedy does; row 0 is what follows the root.
    logits = torch.full((len(choices), 2), -torch.inf)
    logits[range(len(choices)), choices] = 0.0
    (verdict,) = verify([tree], logits[None], Sampler(SamplingParams(temperature), [Chooses()]))
    # Oracle: from each node look for a child by going over all nodes.
    path, node = [], -1
    while True:
        equal = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == choices[node + 1]]
        if not equal:
            break
        node = equal[0]
        path.append(node)
    assert verdict.path == tuple(path) and verdict.next_token == choices[node + 1]
