"""Compaction of the cache, and the mask of a tree, against what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.modules.engine.cache import KVCache, tree_mask

LAYERS, BATCH, HEADS, CAPACITY, DIM = 2, 3, 2, 12, 4
CPU = torch.device("cpu")


def joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[B, heads, T, D] each -> [B, T, 2 * heads, D], as layers write them."""
    return torch.cat([keys, values], dim=1).transpose(1, 2).contiguous()


def filled_cache(length: int) -> KVCache:
    """Layer l, key or value, row b and slot s hold the number that says so."""
    cache = KVCache(torch.zeros(LAYERS, 2, BATCH, HEADS, CAPACITY, DIM), written=0)
    shape = (BATCH, HEADS, length, DIM)
    rows = torch.arange(BATCH).view(-1, 1, 1, 1)
    slots = torch.arange(length).view(1, 1, -1, 1)
    for layer in range(LAYERS):
        content = 1000 * layer + 100 * rows + slots
        cache.write(layer, joined(content.expand(shape).float(), -content.expand(shape).float()))
    cache.length = length
    return cache


def slots_of(cache: KVCache, layer: int, row: int) -> list[int]:
    keys, values = cache.data[layer, 0, row, 0, :, 0], cache.data[layer, 1, row, 0, :, 0]
    assert torch.equal(keys, -values)
    return (keys[: cache.length] - 1000 * layer - 100 * row).int().tolist()


@pytest.mark.parametrize(
    ("length", "slots", "kept"),
    [
        (4, (), [0, 1, 2, 3]),
        (4, (4, 5), [0, 1, 2, 3, 4, 5]),  # contiguous: in place
        (4, (6, 9), [0, 1, 2, 3, 6, 9]),
        (4, (5, 6), [0, 1, 2, 3, 5, 6]),  # source and destination overlap
        (0, (3,), [3]),
        (0, (), []),
        (10, (), list(range(10))),
    ],
)
def test_keep_moves_the_accepted_path_behind_the_kept_tokens(length, slots, kept):
    cache = filled_cache(10)
    cache.keep(length, slots)
    assert cache.length == len(kept)
    for layer in range(LAYERS):
        for row in range(BATCH):
            assert slots_of(cache, layer, row) == kept


def test_what_is_written_again_at_the_same_place_after_a_wipe_is_wiped_again():
    cache = filled_cache(2)
    for _ in range(2):  # the same slices serve both
        cache.keep(0)
        assert not cache.data.any()
        content = torch.ones(BATCH, HEADS, 2, DIM)
        cache.write(0, joined(content, content))
    cache.keep(0)
    assert not cache.data.any()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_node_sees_the_kept_tokens_its_ancestors_and_itself(choices, start):
    parents = [choice % (i + 1) - 1 for i, choice in enumerate(choices)]
    depths, mask = tree_mask(parents, start, CPU)
    for node in range(len(parents)):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = parents[at]
        assert depths[node] == len(path) - 1
        assert mask[node].nonzero()[:, 0].tolist() == [*range(start), *(start + i for i in sorted(path))]
