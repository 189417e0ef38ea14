"""Compaction of the cache, and the mask of a tree, against what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.modules.engine.cache import KVCache, RowsCache, tree_mask

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


def test_write_returns_everything_up_to_the_new_slots():
    cache = filled_cache(5)
    new = torch.full((BATCH, HEADS, 2, DIM), 7.0)
    keys, values = cache.write(1, joined(new, new + 1))
    assert keys.shape == (BATCH, HEADS, 7, DIM)
    assert keys[0, 0, :, 0].tolist() == [1000, 1001, 1002, 1003, 1004, 7, 7]
    assert values[0, 0, 5:, 0].tolist() == [8, 8]
    assert cache.length == 5  # written, not kept


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


def test_rows_write_at_their_own_slots_and_read_the_span():
    cache = RowsCache(torch.zeros(LAYERS, 2, BATCH, HEADS, CAPACITY, DIM))
    slots = torch.tensor([[3, 4], [0, 1]])  # two of three rows are in use
    new = torch.arange(2 * 2 * 2 * HEADS * DIM, dtype=torch.float32).view(2, 2, 2 * HEADS, DIM) + 1
    cache.place(slots, 6)
    keys, values = cache.write(1, new)
    assert keys.shape == values.shape == (2, HEADS, 6, DIM)
    expected = torch.zeros(2, 2, HEADS, 6, DIM)
    for row in range(2):
        for i, slot in enumerate(slots[row].tolist()):
            expected[0, row, :, slot], expected[1, row, :, slot] = new[row, i, :HEADS], new[row, i, HEADS:]
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    assert cache.data[0].abs().sum() == cache.data[1, :, 2].abs().sum() == 0  # other layers, other rows


def test_a_row_is_a_cache_of_its_own_over_the_same_memory_which_never_moves():
    cache = RowsCache(torch.zeros(LAYERS, 2, BATCH, HEADS, CAPACITY, DIM))
    memory = cache.data.data_ptr()
    for row in range(BATCH):
        own = cache.row(row)
        content = torch.full((1, HEADS, 2, DIM), 10.0 * row + 1)
        own.write(0, joined(content, content))
        assert own.length == 0 and own.capacity == CAPACITY
    cache.select_rows(torch.tensor([1, 2]))
    assert cache.data.data_ptr() == memory
    assert cache.data[0, 0, :2, 0, 0, 0].tolist() == [11, 21]
