"""Compaction of the cache and the mask of a tree against what they mean, and attention against an explicit softmax."""

from __future__ import annotations

import pytest
import torch
from cuda_kernels import CudaKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.modules.engine.cache import (
    FOLDED,
    ROWS_TOGETHER,
    KVCache,
    RowsCache,
    as_bias,
    attend,
    prepared,
    tree_mask,
)

LAYERS, BATCH, HEADS, CAPACITY, DIM = 2, 3, 2, 12, 4
CPU = torch.device("cpu")


def filled_cache(length: int) -> KVCache:
    """Layer l, key or value, row b and slot s hold the number that says so."""
    cache = KVCache(torch.zeros(LAYERS, 2, BATCH, HEADS, CAPACITY, DIM), written=0)
    shape = (BATCH, length, HEADS, DIM)
    rows = torch.arange(BATCH).view(-1, 1, 1, 1)
    slots = torch.arange(length).view(1, -1, 1, 1)
    for layer in range(LAYERS):
        content = 1000 * layer + 100 * rows + slots
        cache.write(layer, content.expand(shape).float(), -content.expand(shape).float())
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
        content = torch.ones(BATCH, 2, HEADS, DIM)
        cache.write(0, content, content)
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


def explicit(queries: Tensor, keys: Tensor, values: Tensor, groups: int, bias: Tensor) -> Tensor:
    keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    scores = queries.transpose(1, 2) @ keys.mT * queries.shape[-1] ** -0.5 + bias
    return (scores.softmax(-1) @ values).transpose(1, 2)


def made(length: int, slots: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries within fused projections, keys and values within a cache that has room for more, and a bias."""
    rng = torch.Generator().manual_seed(length)
    queries = torch.randn(2, length, 2 * groups + 4, 16, generator=rng, dtype=dtype)[:, :, : 2 * groups]
    keys, values = torch.randn(2, 2, 2, 64, 16, generator=rng, dtype=dtype)[..., :slots, :].unbind(0)
    hidden = torch.rand(2, 1, length, slots, generator=rng) < 0.4
    hidden[..., 0] = False
    return queries, keys, values, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("length", "slots", "dtype"), [(1, 64, torch.float64), (6, 61, torch.float64), (FOLDED + 1, 61, torch.bfloat16)]
)
def test_a_mask_and_shared_keys(monkeypatch, cuda, groups, length, slots, dtype):
    queries, keys, values, bias = made(length, slots, groups, dtype)
    wanted = explicit(*(part.double() for part in (queries, keys, values)), groups, bias.double())
    kernels = CudaKernels(monkeypatch) if cuda else None
    found = attend(queries, keys, values, groups, prepared(bias, groups))
    if kernels is not None:
        uncopied = kernels.data == [keys.untyped_storage().data_ptr()]
        assert kernels.masked == 1 and uncopied == (groups == 1 or length <= FOLDED)
    assert (found - wanted).abs().max() < (1e-12 if dtype == torch.float64 else 0.02)  # bf16 keeps 8 bits


def test_the_mask_of_one_query_is_a_view_and_that_of_a_slice_begins_where_kernels_want_it(monkeypatch):
    CudaKernels(monkeypatch)
    bias = torch.randn(2, 1, 1, 64)
    folded = prepared(bias, 4)
    assert folded.shape == (2, 1, 4, 64) and folded.data_ptr() == bias.data_ptr()
    strip = torch.randn(6, 80)[:, 3:67]
    assert torch.equal(prepared(strip, 1), strip) and prepared(strip, 1).storage_offset() == 0
    assert torch.equal(prepared(strip, 2), strip.repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_different_lengths_read_their_own_slots(dtype):
    rng = torch.Generator().manual_seed(0)
    rows, slots = ROWS_TOGETHER + 3, 40
    cache = RowsCache(torch.randn(1, 2, rows, 2, slots, 16, generator=rng, dtype=dtype))
    last = torch.randint(0, slots - 1, (rows, 1), generator=rng)
    cache.place(last, slots)
    keys, values = cache.write(0, *torch.randn(rows, 1, 4, 16, generator=rng, dtype=dtype).chunk(2, 2))
    bias = as_bias(torch.arange(slots) <= last[..., None], dtype)[:, None]
    queries = torch.randn(rows, 1, 8, 16, generator=rng, dtype=dtype)
    wanted = explicit(*(part.double() for part in (queries, keys, values)), 4, bias.double())
    found = attend(queries, keys, values, 4, prepared(bias, 4), spans=cache.spans)
    assert cache.spans == [int(own.max()) + 1 for own in (last[:ROWS_TOGETHER], last[ROWS_TOGETHER:])]
    assert (found - wanted).abs().max() < (1e-12 if dtype == torch.float64 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_without_a_mask(monkeypatch, dtype, causal):
    """Half precision leaves a prompt's shared keys to flash; for it alone wider ones copy."""
    length = 6 if causal else 1
    queries, keys, values, _ = made(length, length if causal else 61, 4, dtype)
    bias = torch.full((length, keys.shape[2]), -torch.inf).triu(1) if causal else torch.zeros(1, keys.shape[2])
    wanted = explicit(*(part.double() for part in (queries, keys, values)), 4, bias.double())
    kernels = CudaKernels(monkeypatch)
    found = attend(queries, keys, values, 4, causal=causal)
    uncopied = kernels.data == [keys.untyped_storage().data_ptr()]
    assert kernels.plain == 1 and uncopied == (not causal or dtype == torch.bfloat16)
    assert (found - wanted).abs().max() < (1e-12 if dtype == torch.float64 else 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 6])
def test_torch_has_a_fused_kernel_for_it(dtype, length):
    """Asked of torch itself: with everything else forbidden it would raise."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = [part.cuda() for part in made(length, 61, 4, dtype)]
    queries, keys, values, bias = parts
    wanted = explicit(*(part.double() for part in (queries, keys, values)), 4, bias.double())
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = attend(queries, keys, values, 4, prepared(bias, 4))
        attend(queries, keys, values, 4) if length == 1 else attend(
            queries, keys[:, :, :length], values[:, :, :length], 4, causal=True
        )
    assert (found - wanted).abs().max() < (2e-3 if dtype == torch.float32 else 0.02)
