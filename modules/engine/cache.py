"""Attention over cached keys and values: the caches that decoder layers write to, and the kernels that read them.

Where query heads share keys, few queries are folded: every head becomes one more query of the shared keys. Kernels then
need no support for grouped queries, which on a CPU saves up to half of the time (for a single bf16 query, seven
eighths). Of CUDA's kernels, flash takes neither a mask nor float32, and the memory-efficient one no grouped queries
(torch's sdp_utils.cpp, 2.8 to 2.13): asked for both, torch copies keys and values for every head and stores all scores.

B rows, T new tokens of each, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Folding gains nothing on a CPU for more queries than this, and their mask becomes large.
FOLDED = 64
# Rows that are attended together on a CPU: fewer cost more calls, and all read as many slots as the longest.
ROWS_TOGETHER = 12
# The memory-efficient kernel wants strides and start of a mask in multiples of this.
ALIGNMENT = 8


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible` is true and -inf elsewhere. Made once a forward; kernels would make it once a layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def tree_mask(parents: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return depths [T] and the mask [T, start + T] (bool) of a tree that follows `start` kept tokens.

    Depth 0 follows the kept tokens (parent -1). A node sees the kept tokens, its ancestors and itself.
    """
    size = len(parents)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    # Pointer doubling: each node takes over what its pointer sees, then moves its pointer to its pointer's pointer.
    # The extra last node stands for the kept tokens: it sees no node and points to itself.
    above = torch.tensor([*(parent if parent >= 0 else size for parent in parents), size], device=device)
    sees = torch.eye(size + 1, size, dtype=torch.bool, device=device)
    for _ in range(max(depths).bit_length()):
        sees, above = sees | sees[above], above[above]
    sees = sees[:size]
    return torch.tensor(depths, device=device), torch.cat([sees.new_ones(size, start), sees], 1)


def takes_shared(tensor: Tensor) -> bool:
    """Return whether kernels of the tensor's device take grouped queries together with any mask."""
    return not tensor.is_cuda


def prepared(mask: Tensor, groups: int) -> Tensor:
    """Fold and align a bias [.., T, S] for `attend`, where `groups` query heads share keys. Done once a forward.

    Of FOLDED queries or fewer the result is [.., T * groups, S]; of a single query it is a view.
    """
    if groups > 1 and mask.shape[-2] <= FOLDED:
        *outer, length, slots = mask.shape
        mask = mask.unsqueeze(-2).expand(*outer, length, groups, slots).flatten(-3, -2)
    if takes_shared(mask):
        return mask
    slots, (*strides, last) = mask.shape[-1], mask.stride()
    if last == 1 and not any(step % ALIGNMENT for step in (mask.storage_offset(), *strides)):
        return mask
    return mask.new_empty(*mask.shape[:-1], slots + -slots % ALIGNMENT)[..., :slots].copy_(mask)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: int,
    mask: Tensor | None = None,
    causal: bool = False,
    spans: Sequence[int] = (),
) -> Tensor:
    """Attend with queries [B, T, kv_heads * groups, D] to keys and values [B, kv_heads, S, D]: [B, T, heads, D].

    mask: a `prepared` bias. Without one a single query sees all keys, and `causal` queries (T == S) those up to theirs.
    spans: slots that any of each ROWS_TOGETHER rows sees; the others are not read. Empty: S.
    """
    if len(spans) > 1 and mask is not None:
        firsts = range(0, len(queries), ROWS_TOGETHER)
        return torch.cat(
            [
                attend(queries[own], keys[own, :, :span], values[own, :, :span], groups, mask[own, ..., :span])
                for own, span in zip((slice(first, first + ROWS_TOGETHER) for first in firsts), spans, strict=True)
            ]
        )
    if groups > 1 and queries.shape[1] == 1:
        # A view, which is also the mask's order.
        folded = queries.view(len(queries), -1, groups, queries.shape[-1])  # [B, kv_heads, groups, D]
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return attended.flatten(1, 2).unsqueeze(1)
    if groups > 1 and mask is not None and mask.shape[-2] > queries.shape[1]:
        folded = queries.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)  # [B, kv_heads, T * groups, D]
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return attended.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)
    shared = groups > 1
    if shared and not takes_shared(keys) and (mask is not None or queries.dtype not in (torch.float16, torch.bfloat16)):
        # A long prompt: only the memory-efficient kernel is left, which needs a copy of the keys for every head.
        keys, values, shared = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), False
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=causal, enable_gqa=shared
    )
    return attended.transpose(1, 2)


def attend_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attend as `attend` does, with an entry of score sinks [heads] and no value beside the keys.

    No fused kernel has such an entry.
    """
    groups, length = queries.shape[2] // keys.shape[1], queries.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)  # [B, heads, S, D]
    scores = queries.transpose(1, 2) @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5  # [B, heads, T, S]
    if causal:
        mask = as_bias(torch.ones(length, length, dtype=torch.bool, device=keys.device).tril(), scores.dtype)
    elif mask is not None and mask.shape[-2] > length:
        mask = mask[..., ::groups, :]  # folded by `prepared`
    scores = scores if mask is None else scores + mask
    scores = torch.cat([scores, sinks[:, None, None].expand(len(scores), -1, length, 1).to(scores.dtype)], -1)
    return (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)


def any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Attend inside the block without cuDNN, whose plan of each new shape takes some 60 ms: for texts of any length."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class NoCache:
    """Teacher forcing: a call sees its own keys and values only, and nothing is kept."""

    length = offset = first = 0
    spans: Sequence[int] = ()

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (part.view(-1, *part.shape[-3:]).transpose(1, 2) for part in (key, value))
        return keys, values


class KVCache:
    """Keys and values [layers, 2, B, kv_heads, capacity, D] in one tensor; the first `length` slots are kept tokens.

    One tensor, so that keeping an accepted path is one copy over all layers.
    spans: see `attend`. offset: position of slot 0: a window lets the first tokens go. first: the first slot that the
    next forward reads.
    """

    spans: Sequence[int] = ()

    def __init__(self, data: Tensor, written: int | None = None):
        """data: finite numbers everywhere, or 0 * nan spoils the attention to slots that a mask hides. written: slots
        that may hold something; None: all."""
        self.data, self.length, self.capacity = data, 0, data.shape[-2]
        self.offset = self.first = 0
        self._written = self.capacity if written is None else written
        # As layers write and read it. Sliced once a forward for all layers: on small models making views is most of
        # the cost of writing.
        self._halves = data.flatten(0, 1)  # [layers * 2, B, kv_heads, capacity, D]
        self._slots = self._halves.transpose(2, 3)  # [layers * 2, B, capacity, kv_heads, D]
        # First slot and number of the slices, and the first one read.
        self._place: tuple[int, int, int] | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [B, T, kv_heads, D], or [T, kv_heads, D] of a single row, behind the kept tokens.

        Returns all that is cached from slot `first` on: keys and values [B, kv_heads, length + T - first, D].
        """
        place = self.length, key.shape[-3], self.first
        if place != self._place:
            start, count, first = place
            self._written = max(self._written, start + count)
            self._fresh = self._slots.narrow(2, start, count).unbind(0)
            self._seen = self._halves.narrow(3, first, start + count - first).unbind(0)
            self._place = place
        self._fresh[2 * layer].copy_(key)
        self._fresh[2 * layer + 1].copy_(value)
        return self._seen[2 * layer], self._seen[2 * layer + 1]

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        """Keep the first `length` slots, then those at `slots` (ascending, >= length), moved to follow them.

        If nothing is kept, the written slots are zeroed: another sequence may have left NaN there.
        """
        end = length + len(slots)
        if end == 0:
            with torch.inference_mode():
                self.data[..., : self._written, :].zero_()
            self._written, self._place = 0, None
        # A contiguous path lies in its place already.
        if list(slots) != list(range(length, end)):
            with torch.inference_mode():
                index = torch.tensor(slots, device=self.data.device)
                self.data[..., length:end, :] = self.data.index_select(-2, index)
        self.length = end

    def make_room(self, window: int | None, unread: int, room: int) -> int:
        """Drop tokens that a layer's window hides from what comes next, if there is no room for that.

        unread: inputs that come next. Returns how many of them are to be left out, because the window hides them from
        the last one, whose output alone is wanted. room: slots for what follows them.
        """
        if window is None:
            return 0
        skipped = max(0, unread - window)
        if skipped or self.length + unread + room > self.capacity:
            kept = 0 if skipped else min(self.length, window - 1)
            with torch.inference_mode():
                self.data[..., :kept, :] = self.data[..., self.length - kept : self.length, :].clone()
            self.offset += self.length - kept + skipped
            self.length = kept
        return skipped


class RowsCache(KVCache):
    """A cache for rows of different lengths, which its caller tracks: `length` stays 0.

    `place` sets the slots that the next forward writes and how many it reads. Slots behind a row's kept tokens hold old
    values, which the mask hides, so that dropping tokens moves nothing. Rows in use are the first ones. Memory never
    moves, because CUDA graphs are captured over it.
    """

    def __init__(self, data: Tensor, capacity: int | None = None):
        """capacity: slots for tokens of a row, the first ones; None: all. A row's own cache has no others."""
        super().__init__(data)
        _, _, batch, num_kv_heads, slots, head_dim = data.shape
        self.capacity = slots if capacity is None else capacity
        self._layers = list(data)
        # Every slot of every head as one row of a matrix: a layer writes with one call, by an index made once.
        self._flat = [layer.view(-1, head_dim) for layer in self._layers]
        first = torch.arange(2 * batch * num_kv_heads, device=data.device) * slots
        self._first = first.view(2, batch, num_kv_heads).transpose(0, 1).reshape(batch, 1, -1)  # [B, 1, 2 * kv_heads]

    def place(self, slots: Tensor, span: int) -> None:
        """Write the next forward's inputs to slots [B, T], and read the first `span` slots of the first B rows."""
        self._index = self._first[: len(slots)] + slots[..., None]  # [B, T, 2 * kv_heads]
        self._batch, self._span = len(slots), span
        if not slots.is_cuda:
            self.spans = [int(own.max()) + 1 for own in slots.split(ROWS_TOGETHER)]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value where `place` said and return keys and values [B, kv_heads, span, D]."""
        self._flat[layer].index_put_((self._index,), torch.cat([key, value], -2))
        keys, values = self._layers[layer].narrow(1, 0, self._batch).narrow(3, 0, self._span).unbind(0)
        return keys, values

    def prompts(self, rows: Sequence[int]) -> PromptCache:
        """Return these rows, which are empty, as a cache for prompts that are read side by side."""
        return PromptCache(self._flat, self._first[list(rows)])

    def row(self, index: int) -> KVCache:
        """Return one row as a cache of its own with no kept tokens, over the same memory."""
        return KVCache(self.data[:, :, index : index + 1, ..., : self.capacity, :])

    @torch.inference_mode()
    def wipe(self, first: int, end: int) -> None:
        """Zero rows [first, end): another sequence may have left NaN, which no mask hides."""
        self.data[:, :, first:end].zero_()

    @torch.inference_mode()
    def move(self, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Copy slots old [P] of rows [P] to slots new [P] of the same rows, all at once."""
        self.data[:, :, rows, :, new] = self.data[:, :, rows, :, old]

    @torch.inference_mode()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in place. No row may move backwards: it would overwrite one not yet moved."""
        for new, old in enumerate(rows):
            if new != old:
                self.data[:, :, new].copy_(self.data[:, :, old])


class PromptCache(NoCache):
    """Rows of a `RowsCache` for prompts: an input sees the inputs before it only, all of which are stored."""

    def __init__(self, layers: Sequence[Tensor], first: Tensor):
        """layers: slots of every head, [slots, D] each. first: [R, 1, 2 * kv_heads], the rows' first ones."""
        self._layers, self._first = layers, first
        self._index: Tensor | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._index is None:
            slots = torch.arange(key.shape[-3], device=self._first.device)
            self._index = self._first + slots[:, None]  # [R, T, 2 * kv_heads]
        self._layers[layer].index_put_((self._index,), torch.cat([key, value], -2))
        return super().write(layer, key, value)


LayerCache = KVCache | NoCache


class CachedAttention:
    """Attention over a cache (`layers.Attend`), for B sequences end to end; `layer` is the layer that calls it, `mask`
    its bias."""

    layer = 0

    def __init__(self, cache: LayerCache, batch: int, groups: int, mask: Tensor | None, causal: bool):
        """groups, mask, causal: as of `attend`."""
        self._cache, self._batch, self._groups, self.mask, self._causal = cache, batch, groups, mask, causal

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return values [B, T, heads, D] of the tokens."""
        if self._batch > 1:
            query, key, value = (part.reshape(self._batch, -1, *part.shape[-2:]) for part in (query, key, value))
        elif query.dim() == 3:
            query = query.unsqueeze(0)
        keys, values = self._cache.write(self.layer, key, value)  # [B, kv_heads, S, D]
        if sinks is None:
            return attend(query, keys, values, self._groups, self.mask, self._causal, self._cache.spans)
        return attend_with_sinks(query, keys, values, sinks, self.mask, self._causal)
