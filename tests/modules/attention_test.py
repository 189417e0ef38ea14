"""Diagonal attention against one explicit softmax over all that a row sees, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.modules.attention import diagonal_attention


def explicit(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Passes side by side, [T, K*T] scores: causal in the first pass, the diagonal in the others."""
    groups, length = query.shape[1] // keys[0].shape[1], query.shape[2]
    all_keys, all_values = (torch.cat([x.repeat_interleave(groups, 1) for x in xs], 2) for xs in (keys, values))
    causal, own = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    seen = torch.cat([causal, *[own] * (len(keys) - 1)], 1)
    scores = (query @ all_keys.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ all_values


def made(heads: int, kv_heads: int, ttt_steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list, list]:
    rng = torch.Generator().manual_seed(ttt_steps)
    shape = (2, kv_heads, 9, 4)
    query = torch.randn(2, heads, 9, 4, generator=rng, dtype=dtype, requires_grad=True)
    keys, values = (
        [torch.randn(shape, generator=rng, dtype=dtype, requires_grad=True) for _ in range(ttt_steps)] for _ in range(2)
    )
    return query, keys, values


@pytest.mark.parametrize(("heads", "kv_heads", "ttt_steps"), [(4, 4, 1), (4, 2, 2), (4, 1, 7)])
def test_values_and_gradients(heads: int, kv_heads: int, ttt_steps: int) -> None:
    query, keys, values = made(heads, kv_heads, ttt_steps)
    ours = diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)))
    wanted = explicit(query, keys, values)
    assert (ours - wanted).abs().max() < 1e-10
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=ours.dtype)
    inputs = [query, *keys, *values]
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, wanted)), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_the_cpu_does(dtype: torch.dtype, size: int) -> None:
    """Values and gradients of both kernels, grouped heads and a length that is no multiple of their blocks."""
    rng, shapes = torch.Generator().manual_seed(1), [(2, 8, 333, size), *[(2, 2, 333, size)] * 6]
    inputs = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=rng, dtype=torch.float64)
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        query, *rest = own = [x.to(device, kind).requires_grad_() for x in inputs]
        keys, values = rest[:3], rest[3:]
        out = diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)))
        found.append([out, *torch.autograd.grad((out * weight.to(device, kind)).sum(), own)])
    bar = 2e-3 if dtype == torch.float32 else 0.05  # of the largest value: TF32 and bf16 keep 10 and 8 bits
    for wanted, ours in zip(*found, strict=True):
        assert (ours.double().cpu() - wanted).abs().max() < bar * wanted.abs().max()


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
