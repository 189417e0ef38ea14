"""Attention while training: texts of a flat row, and drafts that begin at every row of a text at once.

Documents lie end to end in one row, without padding, and none attends to another. Everything that works on single
tokens (projections, MLP, lm_head, losses) runs on the flat row [1, N, ...]. Attention alone lays the documents side by
side, [D, L] padded at the right, where a plain causal mask suffices. With documents of similar length that padding is
small.

A draft that begins at row t reads the text up to t in its first pass, and in each later pass one token more, its own
(training-time test: EAGLE-3, section 3.2; SafeAILab/EAGLE eagle/traineagle3/cnets.py computes the same). So the rows of
a pass see the keys of pass 0 causally, and of every later pass the one of their own row; the mask [T, K T] grows by a
diagonal with each pass:

              keys of pass 0    of pass 1    of pass 2
    row 0       x . . .          x . . .      x . . .
    row 1       x x . .          . x . .      . x . .
    row 2       x x x .          . . x .      . . x .
    row 3       x x x x          . . . x      . . . x

That mask never exists: the causal part runs on a fused kernel, and the few entries beside it are merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.modules.layers import Attention
from draftsmith.modules.transfer import to_device, true_places


@dataclass(frozen=True)
class Documents:
    """D documents of a flat row of N tokens, the longest of length L.

    lengths: of each document, at least 1. rows: [D, L] int64, index in the flat row of each token; 0 on padding.
    flat: [N] int64, index in the D * L padded tokens of each token of the flat row.
    """

    lengths: tuple[int, ...]
    rows: Tensor
    flat: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        # On the host, so that no device is waited for.
        sizes = torch.tensor(list(lengths), dtype=torch.int64)  # [D]
        columns = torch.arange(max(lengths, default=0))  # [L]
        real = columns < sizes[:, None]  # [D, L]
        rows = torch.where(real, (sizes.cumsum(0) - sizes)[:, None] + columns, 0)
        return cls(tuple(lengths), to_device(rows, device), to_device(true_places(real), device))

    def pad(self, flat: Tensor) -> Tensor:
        """Lay [1, N, ...] out as [D, L, ...]; padding is arbitrary."""
        return flat[0].index_select(0, self.rows.flatten()).view(*self.rows.shape, *flat.shape[2:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Lay [D, L, ...] out as [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.flat)[None]


def group_by_length(lengths: Sequence[int], most_tokens: int, most_padding: float = 1.0) -> list[list[int]]:
    """Group sequences of like lengths to be read side by side. Returns their numbers, the longest sequences first.

    most_tokens: of a group of several, padding included. most_padding: share of a sequence's place that may be padding.
    """
    groups: list[list[int]] = []
    # Sequences of equal length keep their order, so that every run makes the same groups.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        widest = lengths[groups[-1][0]] if groups else 0
        if not groups or (len(groups[-1]) + 1) * widest > most_tokens or lengths[i] < (1 - most_padding) * widest:
            groups.append([])
        groups[-1].append(i)
    return groups


aten = torch.ops.aten
# Keys and values of a pass, [B, kv_heads, T, D] each.
Entry = tuple[Tensor, Tensor]


def attend_pass(
    attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, entries: list[Entry], documents: Documents | None
) -> Tensor:
    """Return the attention [B, T, H] of the next pass over x [B, T, H'], and append its keys and values to `entries`.

    documents: of a flat batch [1, N, H'].
    """
    query, key, value = attention.project(x, cos, sin)  # [B, heads, T, D], twice [B, kv_heads, T, D]
    if documents is not None:
        # [1, heads, N, D] -> [documents, heads, L, D]
        query, key, value = (documents.pad(part.transpose(1, 2)).transpose(1, 2) for part in (query, key, value))
    entries.append((key, value))
    mixed = diagonal_attention(query, entries[0], entries[1:]).transpose(1, 2).flatten(2)  # [B, T, heads * D]
    return attention.o_proj(mixed if documents is None else documents.unpad(mixed))


def diagonal_attention(query: Tensor, first: Entry, own: Sequence[Entry] = ()) -> Tensor:
    """Apply one softmax over the first pass, causally, and the rows' own entries: [B, heads, T, D] like `query`.

    first: of the first pass. own: of each later pass up to this one; without any it is plain causal attention.
    """
    key, value = first
    # Under autocast rotated queries and keys are wider than values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    own_keys, own_values = [key.to(value.dtype) for key, _ in own], [value for _, value in own]
    return _Diagonal.apply(query, key, value, *own_keys, *own_values)


class _Diagonal(torch.autograd.Function):
    """`diagonal_attention` with one of torch's fused kernels for the causal part.

    Their backward rebuilds probabilities as exp(score - norm) and subtracts the common grad . out. Given the TOTAL
    output and log-sum-exp in place of its own, its gradient is the exact one of its part of the common softmax.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        attended, norm, state = _causal(query, key, value)
        weights = query.new_empty(0)
        if keys:
            # Of each row with its own keys, summed in float32 at least: [B, heads, T, passes].
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            scores = torch.stack([(query * _spread(own_key, query)).sum(-1, dtype=wide) for own_key in keys], -1)
            scores = scores * query.shape[-1] ** -0.5
            total = torch.logaddexp(norm, scores.logsumexp(-1))
            weights = (scores - total[..., None]).exp()
            attended = attended * (norm - total).exp()[..., None].to(query.dtype)
            for i, own_value in enumerate(values):
                attended = torch.addcmul(attended, weights[..., i : i + 1].to(query.dtype), _spread(own_value, query))
            norm = total
        ctx.save_for_backward(query, key, value, attended, norm, *state, weights, *own)
        ctx.num_state = len(state)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, attended, norm, *rest = ctx.saved_tensors
        state, (weights, *own) = rest[: ctx.num_state], rest[ctx.num_state :]
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        grad = grad.contiguous()
        to_query, to_key, to_value = _causal_backward(grad, query, key, value, attended, norm, state)
        scale, common = query.shape[-1] ** -0.5, (grad * attended).sum(-1)
        to_keys, to_values = [], []
        # With out = sum_i w_i v_i and g = d loss / d out:
        # d loss / d v_i = w_i g,  d loss / d score_i = w_i (<g, v_i> - <g, out>)
        for i, (own_key, own_value) in enumerate(zip(keys, values, strict=True)):
            weight = weights[..., i].to(query.dtype)
            to_score = (weight * ((grad * _spread(own_value, grad)).sum(-1) - common) * scale)[..., None]
            to_query = torch.addcmul(to_query, to_score, _spread(own_key, query))
            to_keys.append(_gather(to_score * query, own_key))
            to_values.append(_gather(weight[..., None] * grad, own_value))
        return to_query, to_key, to_value, *to_keys, *to_values


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend causally: values [B, heads, T, D], log-sum-exp [B, heads, T] of the scores, the kernel's random state.

    The kernels are called by name, not through `scaled_dot_product_attention`, which hides the log-sum-exp. A compiled
    flex_attention has one, and compiles anew for every length: no batch of texts is shaped like the one before.
    """
    if query.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True), []
    if _takes_flash(query):
        attended, norm, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return attended, norm, [seed, offset]
    attended, norm, *state = aten._scaled_dot_product_efficient_attention(
        query, _spread(key, query), _spread(value, query), None, True, 0.0, True
    )
    return attended, norm[..., : query.shape[2]], state  # the kernel pads rows to a multiple of 32


def _causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, norm: Tensor, state: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `attended` and `norm` may be those of a larger softmax."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, attended, norm, 0.0, True
        )
    length = query.shape[2]
    if _takes_flash(query):
        return aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, attended, norm, None, None, length, length, 0.0, True, *state
        )
    norm = F.pad(norm, (0, -length % 32), value=torch.inf)
    to_query, to_key, to_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, _spread(key, query), _spread(value, query), None, attended, norm, *state, 0.0,
        [True, True, True, False], True,
    )  # fmt: skip
    return to_query, _gather(to_key, key), _gather(to_value, value)


def _takes_flash(query: Tensor) -> bool:
    """Return whether FlashAttention supports it: half precision, Ampere or later, a head size of 8 n up to 256."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    modern = query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)
    return half and modern and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _spread(shared: Tensor, like: Tensor) -> Tensor:
    """Repeat keys or values [B, kv_heads, T, D] for each of the heads that share them."""
    groups = like.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _gather(grad: Tensor, shared: Tensor) -> Tensor:
    """Sum the gradients [B, heads, T, D] of the heads that share keys or values: the backward of `_spread`."""
    groups = grad.shape[1] // shared.shape[1]
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)
