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

A window of W tokens hides what decoding does not see: row t of pass j stands at position t + j, and sees the keys of
pass 0 from t + j - W + 1 on. Kernels that know no windows attend band by band.

A part of a long text is learned by itself: its queries are the last ones of pass 0, whose keys are those of the text so
far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
# Keys and values of a pass.
Entry = tuple[Tensor, Tensor]


# Queries whose keys are cut out together, where a kernel knows no windows.
BAND = 512


def attend_text(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Attend causally over whole texts: [B, T, heads, D]. Arguments as of `attend_entries`."""
    return attend_entries(query, key, value, sinks, entries=[], window=window)


def attend_entries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    entries: list[Entry],
    documents: Documents | None = None,
    window: int | None = None,
    earlier: Entry | None = None,
) -> Tensor:
    """Attend in the next pass (`layers.Attend`), which is appended to `entries`: [B, T, heads, D] like the query.

    key, value: [B, T, kv_heads, D]. documents: of a flat batch [1, N, ..]. window: most positions that a row sees, more
    than there are passes. earlier: keys and values of pass 0 before those of a text's part.
    """
    if not entries and earlier is not None:
        key, value = (torch.cat(parts, 1) for parts in zip(earlier, (key, value), strict=True))
    if documents is not None:
        query, key, value = (documents.pad(part) for part in (query, key, value))  # [documents, L, heads, D]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    entries.append((key, value))
    mixed = diagonal_attention(query, entries[0], entries[1:], window, sinks).transpose(1, 2)  # [B, T, heads, D]
    return mixed if documents is None else documents.unpad(mixed)


def diagonal_attention(
    query: Tensor, first: Entry, own: Sequence[Entry] = (), window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Apply one softmax over the first pass, causally, and the rows' own entries: [B, heads, T, D] like `query`.

    first: of the first pass, [B, kv_heads, S, D]; the queries are the last T of its S rows. own: of each later pass up
    to this one; without any it is plain causal attention. window: see `attend_entries`. sinks: [heads], the score of an
    entry without a value that every row sees (MiMo-V2, gpt-oss).
    """
    key, value = first
    # Under autocast rotated queries and keys are wider than values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    own_keys, own_values = [key.to(value.dtype) for key, _ in own], [value for _, value in own]
    reach = None if window is None else window - len(own)  # keys of the first pass that a row sees
    assert reach is None or reach > 0, "a window is longer than a draft"
    if reach is not None and reach >= key.shape[2]:
        reach = None
    return _Diagonal.apply(reach, sinks, query, key, value, *own_keys, *own_values)


class _Diagonal(torch.autograd.Function):
    """`diagonal_attention` with one of torch's fused kernels for the causal part.

    Their backward rebuilds probabilities as exp(score - norm) and subtracts the common grad . out. Given the TOTAL
    output and log-sum-exp in place of its own, its gradient is the exact one of its part of the common softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, reach: int | None, sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *own: Tensor
    ) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        attended, norm, state = _causal(query, key, value, reach)
        weights, total = query.new_empty(0), norm
        if keys:
            # Of each row with its own keys, summed in float32 at least: [B, heads, T, passes].
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            scores = torch.stack([(query * _spread(own_key, query)).sum(-1, dtype=wide) for own_key in keys], -1)
            scores = scores * query.shape[-1] ** -0.5
            total = torch.logaddexp(total, scores.logsumexp(-1))
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None].to(total.dtype))
        if keys or sinks is not None:
            attended = attended * (norm - total).exp()[..., None].to(query.dtype)
        if keys:
            weights = (scores - total[..., None]).exp()
            for i, own_value in enumerate(values):
                attended = torch.addcmul(attended, weights[..., i : i + 1].to(query.dtype), _spread(own_value, query))
        ctx.save_for_backward(query, key, value, attended, total, *state, sinks, weights, *own)
        ctx.num_state, ctx.reach = len(state), reach
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, norm, *rest = ctx.saved_tensors
        state, (sinks, weights, *own) = rest[: ctx.num_state], rest[ctx.num_state :]
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        grad = grad.contiguous()
        to_query, to_key, to_value = _causal_backward(grad, query, key, value, attended, norm, state, ctx.reach)
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
        to_sinks = None
        if sinks is not None:
            to_sinks = -((sinks[:, None] - norm).exp() * common).sum((0, 2)).to(sinks.dtype)
        return None, to_sinks, to_query, to_key, to_value, *to_keys, *to_values


def _causal(query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend causally: values [B, heads, T, D], log-sum-exp [B, heads, T] of the scores, the kernels' random states.

    reach: most keys that a query sees.
    The kernels are called by name, not through `scaled_dot_product_attention`, which hides the log-sum-exp. A compiled
    flex_attention has one, and compiles anew for every length: no batch of texts is shaped like the one before.
    """
    if reach is None and query.shape[2] == key.shape[2]:
        return _attend(query, key, value)
    if query.is_cuda and _takes_flash(query):
        # Causal from the last query and key on.
        inputs = (part.transpose(1, 2) for part in (query, key, value))
        attended, norm, seed, offset, _ = aten._flash_attention_forward(
            *inputs, None, None, query.shape[2], key.shape[2], 0.0, True, False, **_flash_window(reach)
        )
        return attended.transpose(1, 2), norm, [seed, offset]
    parts = [
        _attend(query[:, :, own], key[:, :, seen], value[:, :, seen], bias)
        for own, seen, bias in _bands(query, key, reach)
    ]
    attended, norms, states = zip(*parts, strict=True)
    return torch.cat(attended, 2), torch.cat(norms, 2), list(itertools.chain(*states))


def _flash_window(reach: int | None) -> dict[str, int]:
    return {} if reach is None else {"window_size_left": reach - 1, "window_size_right": 0}


def _bands(query: Tensor, key: Tensor, reach: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield BAND queries at a time, the keys that any of them sees, and the bias [t, s] among these."""
    length, keys = query.shape[2], key.shape[2]
    for start in range(0, length, BAND):
        own = slice(start, min(start + BAND, length))
        end = own.stop + keys - length
        first = 0 if reach is None else max(0, start + keys - length - reach + 1)
        at = torch.arange(start, own.stop, device=query.device)[:, None] + keys - length  # [t, 1], the own keys' places
        place = torch.arange(first, end, device=query.device)
        hidden = (place > at) if reach is None else (place > at) | (place <= at - reach)
        # The memory-efficient kernel wants rows that begin at multiples of 8.
        bias = query.new_zeros(len(at), end - first + (first - end) % 8)[:, : end - first]
        yield own, slice(first, end), bias.masked_fill_(hidden, -torch.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run one kernel with a bias [T, S], or causally without one."""
    causal = bias is None
    if query.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias), []
    if causal and _takes_flash(query):
        attended, norm, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return attended, norm, [seed, offset]
    attended, norm, *state = aten._scaled_dot_product_efficient_attention(
        query, _spread(key, query), _spread(value, query), _whole_bias(bias, query), True, 0.0, causal
    )
    return attended, norm[..., : query.shape[2]], state  # the kernel pads rows to a multiple of 32


def _whole_bias(bias: Tensor | None, query: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


def _causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    norm: Tensor,
    state: Sequence[Tensor],
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `attended` and `norm` may be those of a larger softmax."""
    if reach is None and query.shape[2] == key.shape[2]:
        return _attend_backward(grad, query, key, value, attended, norm, state)
    if query.is_cuda and _takes_flash(query):
        inputs = (part.transpose(1, 2) for part in (grad, query, key, value, attended))
        grads = aten._flash_attention_backward(
            *inputs, norm, None, None, query.shape[2], key.shape[2], 0.0, True, *state, **_flash_window(reach)
        )
        to_query, to_key, to_value = (part.transpose(1, 2) for part in grads)
        return to_query, to_key, to_value
    to_queries, to_key, to_value = [], torch.zeros_like(key), torch.zeros_like(value)
    states = iter(state)
    for own, seen, bias in _bands(query, key, reach):
        own_grad, own_query, own_attended, own_norm = (part[:, :, own] for part in (grad, query, attended, norm))
        own_state = [] if query.device.type == "cpu" else list(itertools.islice(states, 2))
        own_keys = key[:, :, seen], value[:, :, seen]
        grads = _attend_backward(own_grad, own_query, *own_keys, own_attended, own_norm, own_state, bias)
        to_queries.append(grads[0])
        to_key[:, :, seen] += grads[1]
        to_value[:, :, seen] += grads[2]
    return torch.cat(to_queries, 2), to_key, to_value


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    norm: Tensor,
    state: Sequence[Tensor],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `_attend`."""
    causal, length = bias is None, query.shape[2]
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, attended, norm, 0.0, causal, attn_mask=bias
        )
    if causal and _takes_flash(query):
        return aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, attended, norm, None, None, length, length, 0.0, True, *state
        )
    norm = F.pad(norm, (0, -length % 32), value=torch.inf)
    to_query, to_key, to_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, _spread(key, query), _spread(value, query), _whole_bias(bias, query), attended, norm, *state, 0.0,
        [True, True, True, False], causal,
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
