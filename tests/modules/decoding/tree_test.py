"""Shapes of draft trees, against brute force and the published static tree."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.eval.methods.trees import read_tree
from draftsmith.modules.decoding.tree import StaticTree, best_connected


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


@st.composite
def valued_trees(draw):
    """Parents, and values that never grow from parent to child; few of them, so that ties are frequent."""
    size = draw(st.integers(1, 9))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    values: list[int] = []
    for parent in parents:
        values.append(draw(st.integers(0, 3 if parent < 0 else values[parent])))
    return parents, values


@given(valued_trees(), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_reranking_keeps_the_best_and_they_are_connected(tree, count):
    parents, values = tree
    taken = best_connected(parents, values, count)
    assert len(taken) == min(count, len(parents)) and taken == sorted(set(taken))
    assert all(parents[node] == -1 or parents[node] in taken for node in taken)
    # Where children are worth no more than their parents, it is a top `count`.
    assert sorted(values[node] for node in taken) == sorted(values, reverse=True)[: len(taken)][::-1]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), min_size=1, max_size=7), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_without_that_order_it_is_still_a_tree_and_best_first(nodes, count):
    parents = [choice % (i + 1) - 1 for i, (choice, _) in enumerate(nodes)]
    values = [value for _, value in nodes]
    taken = best_connected(parents, values, count)
    assert all(parents[node] == -1 or parents[node] in taken for node in taken)
    # The first `n` taken contain the best child that was open when they were taken: nothing outside, whose parent is
    # inside, is worth more than every leaf inside that could have been left out.
    connected = [
        set(chosen)
        for chosen in combinations(range(len(nodes)), len(taken))
        if all(parents[node] == -1 or parents[node] in chosen for node in chosen)
    ]
    assert set(taken) in connected
    if count >= len(nodes):
        assert taken == list(range(len(nodes)))
