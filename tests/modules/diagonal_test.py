"""Diagonal attention against one explicit softmax over all that a row sees, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.modules.diagonal import diagonal_attention


def explicit(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Passes side by side, [T, K*T] scores: causal in the first pass, the diagonal in the others."""
    groups, length = query.shape[1] // keys[0].shape[1], query.shape[2]
    all_keys, all_values = (torch.cat([x.repeat_interleave(groups, 1) for x in xs], 2) for xs in (keys, values))
    causal, own = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    seen = torch.cat([causal, *[own] * (len(keys) - 1)], 1)
    scores = (query @ all_keys.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ all_values


def made(heads: int, kv_heads: int, passes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list, list]:
    rng = torch.Generator().manual_seed(passes)
    shape = (2, kv_heads, 9, 4)
    query = torch.randn(2, heads, 9, 4, generator=rng, dtype=dtype, requires_grad=True)
    keys, values = (
        [torch.randn(shape, generator=rng, dtype=dtype, requires_grad=True) for _ in range(passes)] for _ in range(2)
    )
    return query, keys, values


@pytest.mark.parametrize("passes", [1, 2, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_values_and_gradients(heads: int, kv_heads: int, passes: int) -> None:
    query, keys, values = made(heads, kv_heads, passes)
    ours = diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)))
    wanted = explicit(query, keys, values)
    assert (ours - wanted).abs().max() < 1e-10
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=ours.dtype)
    inputs = [query, *keys, *values]
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, wanted)), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-10


def test_half_precision_is_near() -> None:
    query, keys, values = made(4, 2, 3, torch.bfloat16)
    ours = diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)))
    wanted = explicit(query.double(), [k.double() for k in keys], [v.double() for v in values])
    assert (ours.double() - wanted).abs().max() < 0.03
    ours.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (query, *keys, *values))


def test_nothing_of_the_size_of_a_mask_is_kept() -> None:
    """What backward holds grows by one entry a pass, not by T."""
    kept: list[int] = []
    query, keys, values = made(4, 4, 5)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)))
    assert max(kept) <= query.numel()
