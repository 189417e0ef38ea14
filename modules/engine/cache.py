"""Attention over cached keys and values: the caches that decoder layers write to, and the kernels that read them.

Where query heads share keys, few queries are folded: every head becomes one more query of the shared keys. Kernels then
need no support for grouped queries, which on a CPU saves up to half of the time (for a single bf16 query, seven
eighths). Of CUDA's kernels, flash takes neither a mask nor float32, and the memory-efficient one no grouped queries
(torch's sdp_utils.cpp, 2.8 to 2.13): asked for both, torch copies keys and values for every head and stores all scores.

B rows, T new tokens of each, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.transfer import to_device_together

# Folding gains nothing on a CPU for more queries than this, and their mask becomes large.
FOLDED = 64
# The memory-efficient kernel wants strides and start of a mask in multiples of this.
ALIGNMENT = 8
# Cost of attention for one more row, in queries of a padded row: among rows that are padded together, and alone.
PADDED_ROW, ROW_ALONE = 6, 11


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
    queries: Tensor, keys: Tensor, values: Tensor, groups: int, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attend with queries [B, T, kv_heads * groups, D] to keys and values [B, kv_heads, S, D]: [B, T, heads, D].

    mask: a `prepared` bias. Without one a single query sees all keys, and `causal` queries (T == S) those up to theirs.
    """
    if groups > 1 and (queries.shape[1] == 1 if mask is None else mask.shape[-2] > queries.shape[1]):
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


class Ragged:
    """Rows with different numbers of inputs, laid out one behind the other as [N, ..].

    Only attention needs rows side by side: it pads the short rows together and reads the long ones one by one.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        """counts: inputs of each row, 0 for idle rows."""
        self.batch, self.width = len(counts), max(counts)
        index = self._places(counts, self.width)
        # The width to pad to that costs least; rows wider than it are read alone.
        width = self._short = min({0, *counts}, key=lambda width: self._cost(counts, width))
        ends = list(accumulate(counts))
        parts = [(row, end - count, end) for row, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
        self._alone = [part for part in parts if part[2] - part[1] > width]
        short = [i for _, start, end in parts if end - start <= width for i in range(start, end)]
        padded = self._places([count if count <= width else 0 for count in counts], width)
        # Places of all inputs in [batch * width]; of the short rows' inputs in [N], and in [batch * short].
        self._index, self._own, self._padded = to_device_together([index, short, padded], device)

    @staticmethod
    def _places(counts: Sequence[int], width: int) -> list[int]:
        return [row * width + i for row, count in enumerate(counts) for i in range(count)]

    @staticmethod
    def _cost(counts: Sequence[int], width: int) -> int:
        """Estimate the time of attention with rows padded to `width` (0: none), longer ones alone."""
        padded = len(counts) * (PADDED_ROW + width) if width else 0
        return padded + sum(ROW_ALONE + count for count in counts if count > width)

    def spread(self, packed: Tensor, places: Tensor | None = None, width: int = 0) -> Tensor:
        """Pad [N, ..] to [batch, width, ..] with zeros, by default to the widest row."""
        width, places = width or self.width, self._index if places is None else places
        padded = packed.new_zeros(self.batch * width, *packed.shape[1:])
        return padded.index_copy_(0, places, packed).unflatten(0, (self.batch, width))

    def pack(self, padded: Tensor) -> Tensor:
        """Undo `spread`: [batch, width, ..] -> [N, ..]."""
        return padded.flatten(0, 1).index_select(0, self._index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, groups: int, mask: Tensor) -> Tensor:
        """Attend with queries [N, heads, D] to their rows' keys and values [batch, kv_heads, S, D]: [N, heads, D].

        mask: the `prepared` bias of [batch, 1, width, S].
        """
        # Lines of the mask for each query.
        attended, lines = torch.empty_like(queries), mask.shape[2] // self.width
        if self._short:
            own = queries.index_select(0, self._own) if self._alone else queries
            padded = self.spread(own, self._padded, self._short)
            short = attend(padded, keys, values, groups, mask[:, :, : self._short * lines])
            short = short.flatten(0, 1).index_select(0, self._padded)
            attended = attended.index_copy_(0, self._own, short) if self._alone else short
        for row, start, end in self._alone:
            one = slice(row, row + 1)
            own_mask = mask[one, :, : (end - start) * lines]
            attended[start:end] = attend(queries[None, start:end], keys[one], values[one], groups, own_mask)[0]
        return attended


class LayerCache(Protocol):
    """Keys and values as a decoder layer uses them."""

    # Kept tokens; new ones follow them.
    length: int

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, groups: int, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Store keys_values [B, T, 2 * kv_heads, D], the keys' heads first, and attend to all that is cached.

        queries: [B, T, heads, D], like the result. mask, causal: see `attend`.
        """


class NoCache:
    """Teacher forcing: a call sees its own keys and values only, and nothing is kept."""

    length = 0

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, groups: int, mask: Tensor | None, causal: bool
    ) -> Tensor:
        batch, length, _, head_dim = keys_values.shape
        keys, values = keys_values.view(batch, length, 2, -1, head_dim).permute(2, 0, 3, 1, 4)
        return attend(queries, keys, values, groups, mask, causal)


class KVCache:
    """Keys and values [layers, 2, B, kv_heads, capacity, D] in one tensor; the first `length` slots are kept tokens.

    One tensor, so that keeping an accepted path is one copy over all layers.
    """

    def __init__(self, data: Tensor, written: int | None = None):
        """data: finite numbers everywhere, or 0 * nan spoils the attention to slots that a mask hides. written: slots
        that may hold something; None: all."""
        self.length = 0
        self._hold(data)
        self._written = self.capacity if written is None else written

    def _hold(self, data: Tensor) -> None:
        self.data = data
        # As layers write and read it. Sliced once a forward for all layers: on small models making views is most of
        # the cost of writing.
        self._slots = data.permute(0, 2, 4, 1, 3, 5)  # [layers, B, capacity, 2, kv_heads, D]
        self._halves = data.flatten(0, 1)  # [layers * 2, B, kv_heads, capacity, D]
        # First slot and number of the slices.
        self._place: tuple[int, int] | None = None

    @property
    def capacity(self) -> int:
        return self.data.shape[-2]

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, groups: int, mask: Tensor | None, causal: bool
    ) -> Tensor:
        keys, values = self.write(layer, self.length, keys_values)
        return attend(queries, keys, values, groups, mask, causal)

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, T, 2 * kv_heads, D] at slots start.. and return keys and values [B, kv_heads, start + T, D]."""
        place = start, keys_values.shape[1]
        if place != self._place:
            end = start + place[1]
            self._written = max(self._written, end)
            self._fresh = self._slots.narrow(2, *place).unbind(0)
            self._seen = self._halves.narrow(3, 0, end).unbind(0)
            self._place = place
        fresh = self._fresh[layer]
        fresh.copy_(keys_values.view(fresh.shape))
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

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch only."""
        self._hold(self.data.index_select(2, rows))


class RowsCache(KVCache):
    """A cache for rows of different lengths, which its caller tracks: `length` stays 0.

    `place` sets the slots that the next forward writes and how many it reads. Slots behind a row's kept tokens hold old
    values, which the mask hides, so that dropping tokens moves nothing. Rows in use are the first ones. Memory never
    moves, because CUDA graphs are captured over it.
    """

    def __init__(self, data: Tensor):
        super().__init__(data)
        _, _, batch, num_kv_heads, capacity, head_dim = data.shape
        self._layers = list(data)
        # Every slot of every head as one row of a matrix: a layer writes with one call, by an index made once.
        self._flat = [layer.view(-1, head_dim) for layer in self._layers]
        first = torch.arange(2 * batch * num_kv_heads, device=data.device) * capacity
        self._first = first.view(2, batch, num_kv_heads).transpose(0, 1).reshape(batch, 1, -1)  # [B, 1, 2 * kv_heads]

    def place(self, slots: Tensor, span: int, ragged: Ragged | None = None) -> None:
        """Write the next forward's inputs to slots [B, T], and read the first `span` slots of the first B rows.

        ragged: the inputs come as [1, N, ..], laid out so.
        """
        index = self._first[: len(slots)] + slots[..., None]  # [B, T, 2 * kv_heads]
        self._index = index if ragged is None else ragged.pack(index)[None]
        self._batch, self._span, self._ragged = len(slots), span, ragged

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, groups: int, mask: Tensor | None, causal: bool
    ) -> Tensor:
        keys, values = self.write(layer, 0, keys_values)
        if self._ragged is None:
            return attend(queries, keys, values, groups, mask, causal)
        assert mask is not None
        return self._ragged.attend(queries[0], keys, values, groups, mask)

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys_values where `place` said and return keys and values [B, kv_heads, span, D]."""
        self._flat[layer].index_put_((self._index,), keys_values)
        keys, values = self._layers[layer].narrow(1, 0, self._batch).narrow(3, 0, self._span).unbind(0)
        return keys, values

    def row(self, index: int) -> KVCache:
        """Return one row as a cache of its own with no kept tokens, over the same memory."""
        return KVCache(self.data[:, :, index : index + 1])

    @torch.inference_mode()
    def wipe(self, first: int, end: int) -> None:
        """Zero rows [first, end): another sequence may have left NaN, which no mask hides."""
        self.data[:, :, first:end].zero_()

    @torch.inference_mode()
    def move(self, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Copy slots old [P] of rows [P] to slots new [P] of the same rows, all at once."""
        self.data[:, :, rows, :, new] = self.data[:, :, rows, :, old]

    @torch.inference_mode()
    def select_rows(self, rows: Tensor) -> None:
        """Move these rows to the front, in place. No row may move backwards: it would overwrite one not yet moved."""
        for new, old in enumerate(rows.tolist()):
            if new != old:
                self.data[:, :, new].copy_(self.data[:, :, old])
