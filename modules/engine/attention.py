"""Attention of cached queries, asked for in a form that fused kernels take and that reads shared keys once.

Where heads share keys, those of few queries are folded: each is one more query of the keys. Kernels then know nothing
of sharing, which on a CPU saves up to half of the time (eight times for one bf16 query). Of CUDA's, flash takes neither
a mask nor float32, and the memory-efficient one no shared keys (torch's sdp_utils.cpp, torch 2.8 to 2.13): asked for
both, torch copies keys and values for every head and stores all scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FOLDED = 64  # queries at most: of more, folding gains nothing on a CPU, and their mask becomes large
ALIGNMENT = 8  # of a mask's strides and start, which the memory-efficient kernel asks for


def takes_shared(tensor: Tensor) -> bool:
    """Kernels of its device take everything beside shared keys, and masks as they lie."""
    return not tensor.is_cuda


def prepared(mask: Tensor, groups: int) -> Tensor:
    """A bias [.., T, S] as `attend` takes it where `groups` heads share keys: made once a forward, not once a layer.

    Of FOLDED queries or fewer it is [.., T * groups, S]; of a single one a view.
    """
    if groups > 1 and mask.shape[-2] <= FOLDED:
        *outer, length, slots = mask.shape
        mask = mask.unsqueeze(-2).expand(*outer, length, groups, slots).flatten(-3, -2)
    if takes_shared(mask) or _aligned(mask):
        return mask
    slots = mask.shape[-1]
    aligned = mask.new_empty(*mask.shape[:-1], slots + -slots % ALIGNMENT)
    return aligned[..., :slots].copy_(mask)


def _aligned(mask: Tensor) -> bool:
    *strides, last = mask.stride()
    return last == 1 and not any(step % ALIGNMENT for step in (mask.storage_offset(), *strides))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, groups: int, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Queries [B, T, kv_heads * groups, D] over keys and values [B, kv_heads, S, D]: [B, T, heads, D].

    mask: `prepared`, added to scores. Without one a single query sees all keys; or, `causal` and T == S, each those up
    to its own.
    """
    if groups > 1 and (queries.shape[1] == 1 if mask is None else mask.shape[-2] > queries.shape[1]):
        folded = queries.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)  # [B, kv_heads, T * groups, D]
        found = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return found.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)
    shared = groups > 1
    if shared and not takes_shared(keys) and (mask is not None or queries.dtype not in (torch.float16, torch.bfloat16)):
        # A long prompt: no kernel but the memory-efficient one, and without the copies a matrix of all scores.
        keys, values, shared = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), False
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=causal, enable_gqa=shared
    )
    return found.transpose(1, 2)
