"""Diagonal attention against one explicit softmax over all that a row sees, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.modules import attention
from draftsmith.modules.attention import diagonal_attention


def explicit(
    query: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Passes side by side, [T, S + (K - 1) T] scores: causal in the first pass, the diagonal in the others.

    A query of pass j stands at t + j, and sees positions less than a window before it.
    """
    groups, length, passes = query.shape[1] // keys[0].shape[1], query.shape[2], len(keys) - 1
    all_keys, all_values = (torch.cat([x.repeat_interleave(groups, 1) for x in xs], 2) for xs in (keys, values))
    place = torch.arange(keys[0].shape[2])
    at = place[-length:, None]  # the queries' rows
    causal, own = place <= at, torch.eye(length).bool()
    if window is not None:
        causal = causal & (at + passes - place < window)
    seen = torch.cat([causal, *[own] * passes], 1)
    scores = (query @ all_keys.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(len(scores), -1, length, 1)], -1)
    return scores.softmax(-1)[..., : all_values.shape[2]] @ all_values


def made(
    heads: int, kv_heads: int, ttt_steps: int, dtype: torch.dtype = torch.float64, earlier: int = 0
) -> tuple[Tensor, list, list]:
    rng = torch.Generator().manual_seed(ttt_steps)
    shapes = [(2, kv_heads, 9 + earlier * (i == 0), 4) for i in range(ttt_steps)]
    query = torch.randn(2, heads, 9, 4, generator=rng, dtype=dtype, requires_grad=True)
    keys, values = (
        [torch.randn(shape, generator=rng, dtype=dtype, requires_grad=True) for shape in shapes] for _ in range(2)
    )
    return query, keys, values


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ttt_steps", "earlier", "window"),
    [
        (4, 4, 1, 0, None), (4, 2, 2, 0, None), (4, 1, 7, 0, None),
        (4, 2, 1, 0, 1), (4, 2, 3, 0, 4), (4, 1, 2, 5, None), (4, 2, 1, 11, 6), (4, 2, 3, 11, 14),
    ],
)  # fmt: skip
def test_values_and_gradients(
    heads: int,
    kv_heads: int,
    ttt_steps: int,
    earlier: int,
    window: int | None,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows, sinks, and queries that begin behind `earlier` keys, in bands of four queries."""
    monkeypatch.setattr(attention, "BAND", 4)
    query, keys, values = made(heads, kv_heads, ttt_steps, earlier=earlier)
    sinks = torch.linspace(-1, 2, heads, dtype=torch.float64).requires_grad_() if with_sinks else None
    own = list(zip(keys[1:], values[1:], strict=True))
    ours = diagonal_attention(query, (keys[0], values[0]), own, window, sinks)
    wanted = explicit(query, keys, values, window, sinks)
    assert (ours - wanted).abs().max() < 1e-10
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=ours.dtype)
    inputs = [query, *keys, *values, *([sinks] if sinks is not None else [])]
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, wanted)), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "earlier"), [(None, 0), (100, 0), (None, 50), (100, 350)])
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_the_cpu_does(dtype: torch.dtype, size: int, window: int | None, earlier: int) -> None:
    """Values and gradients of both kernels, grouped heads and a length that is no multiple of their blocks."""
    first, own = (2, 2, 333 + earlier, size), (2, 2, 333, size)
    rng, shapes = torch.Generator().manual_seed(1), [(2, 8, 333, size), first, own, own, first, own, own]
    inputs = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=rng, dtype=torch.float64)
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        query, *rest = own = [x.to(device, kind).requires_grad_() for x in inputs]
        keys, values = rest[:3], rest[3:]
        out = diagonal_attention(query, (keys[0], values[0]), list(zip(keys[1:], values[1:], strict=True)), window)
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
