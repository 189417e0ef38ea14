"""Attention in the form of CUDA's fused kernels: what plain softmax gives, and nothing of a cache copied."""

from __future__ import annotations

import pytest
import torch
from cuda_kernels import CudaKernels
from torch import Tensor

from draftsmith.modules.engine.cache import FOLDED, ROWS_TOGETHER, RowsCache, as_bias, attend, prepared


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
    keys, values = cache.write(0, torch.randn(rows, 1, 4, 16, generator=rng, dtype=dtype))
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
