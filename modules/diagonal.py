"""Attention of a draft that begins at every row of a text at once: training-time test without a [T, K*T] mask.

A draft begun at row t reads the text up to t in its first pass, and in each later pass one token more, its own. So the
rows of pass j see the keys of the first pass causally and, of every later pass, the one of their own row (EAGLE-3,
section 3.2; SafeAILab/EAGLE eagle/traineagle3/cnets.py computes the same). The causal part runs on a fused kernel; the
few entries beside it are merged by log-sum-exp, so that nothing of size T x T is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def diagonal_attention(
    query: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]] = ()
) -> Tensor:
    """One softmax over the first pass, causally, and the rows' own entries: [B, heads, T, D] like `query`.

    first: keys and values [B, kv_heads, T, D] of the first pass. own: those of each later pass up to this one; none in
    the first pass itself, which is plain causal attention.
    """
    key, value = first
    # Under autocast rotated queries and keys are wider than values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    own_keys, own_values = [key.to(value.dtype) for key, _ in own], [value for _, value in own]
    if query.device.type == "cpu":
        return _DiagonalOnCPU.apply(query, key, value, *own_keys, *own_values)
    return merged(causal_flex(), query, (key, value), own_keys, own_values)


Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def merged(
    attend: Attend,
    query: Tensor,
    first: tuple[Tensor, Tensor],
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """`diagonal_attention` whose causal part is `attend`'s, differentiable as that is: it gives the attended values
    [B, heads, T, D] of queries, keys and values, and the log-sum-exp [B, heads, T] of their scores."""
    attended, norm = attend(query, *first)
    if not own_keys:
        return attended
    scores = _own_scores(query, own_keys)
    total = torch.logaddexp(norm, scores.logsumexp(-1))
    weights = (scores - total[..., None]).exp().to(query.dtype)
    return _add_own(attended * (norm - total).exp()[..., None].to(query.dtype), weights, own_values)


class _DiagonalOnCPU(torch.autograd.Function):
    """The causal part by torch's flash kernel. Its backward is given the TOTAL output and log-sum-exp in the place of
    its own, which makes its gradient the exact one of its part of the common softmax: it rebuilds the probabilities as
    exp(score - norm) and subtracts the common grad . out."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        attended, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        weights = query.new_empty(0)
        if keys:
            scores = _own_scores(query, keys)
            total = torch.logaddexp(norm, scores.logsumexp(-1))
            weights = (scores - total[..., None]).exp()
            attended = _add_own(attended * (norm - total).exp()[..., None].to(query.dtype), weights, values)
            norm = total
        ctx.save_for_backward(query, key, value, attended, norm, weights, *own)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, attended, norm, weights, *own = ctx.saved_tensors
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        grad = grad.contiguous()
        to_query, to_key, to_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, attended, norm, 0.0, True
        )
        scale, common = query.shape[-1] ** -0.5, (grad * attended).sum(-1)
        to_keys, to_values = [], []
        for i, (own_key, own_value) in enumerate(zip(keys, values, strict=True)):
            weight = weights[..., i].to(query.dtype)
            to_score = (weight * ((grad * _spread(own_value, grad)).sum(-1) - common) * scale)[..., None]
            to_query = torch.addcmul(to_query, to_score, _spread(own_key, query))
            to_keys.append(_gather(to_score * query, own_key))
            to_values.append(_gather(weight[..., None] * grad, own_value))
        return to_query, to_key, to_value, *to_keys, *to_values


def _own_scores(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled scores [B, heads, T, passes] of each row with its own keys; half precision is summed in float32."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = [(query * _spread(key, query)).sum(-1, dtype=wide) for key in keys]
    return torch.stack(scores, -1) * query.shape[-1] ** -0.5


def _add_own(attended: Tensor, weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    for i, value in enumerate(values):
        attended = torch.addcmul(attended, weights[..., i : i + 1].to(attended.dtype), _spread(value, attended))
    return attended


def _spread(shared: Tensor, like: Tensor) -> Tensor:
    """Keys or values [B, kv_heads, T, D] for each of the heads that share them."""
    groups = like.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _gather(grad: Tensor, shared: Tensor) -> Tensor:
    """The gradient of what `_spread` spread."""
    groups = grad.shape[1] // shared.shape[1]
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)


@functools.cache
def causal_flex(compiled: bool = True) -> Attend:
    """Causal attention and its log-sum-exp on a GPU. Not compiled, it stores a [T, T] matrix, and runs on a CPU too."""
    flex: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    @functools.lru_cache(maxsize=8)
    def mask(length: int, device: torch.device) -> Any:
        def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return row >= column

        return create_block_mask(causal, None, None, length, length, device=device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        gqa = query.shape[1] != key.shape[1]
        block_mask = mask(query.shape[2], query.device)
        return flex(query, key, value, block_mask=block_mask, enable_gqa=gqa, return_lse=True)

    return attend
