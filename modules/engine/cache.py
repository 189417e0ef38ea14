"""One preallocated tensor for all keys and values, so that keeping an accepted path is one copy over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.modules.engine.ragged import Ragged


class LayerCache(Protocol):
    """What a decoder layer needs of a cache: where its new keys and values go, and all that it may attend to."""

    @property
    def length(self) -> int:
        """Kept tokens: new ones follow them."""

    @property
    def ragged(self) -> Ragged | None:
        """How queries [1, N, ..] of all rows are padded for attention, if they are not padded already."""

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, T, 2 * kv_heads, D], the keys' heads first, at slots start.. and return everything up to there:
        keys and values [B, kv_heads, start+T, D]."""


class NoCache:
    """Teacher forcing: a call sees its own keys and values, and nothing is kept."""

    length = 0
    ragged = None

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = split_heads(keys_values)
        return keys, values


def split_heads(keys_values: Tensor) -> Tensor:
    """[B, T, 2 * kv_heads, D] -> keys and values [2, B, kv_heads, T, D], a view."""
    batch, length, _, head_dim = keys_values.shape
    return keys_values.view(batch, length, 2, -1, head_dim).permute(2, 0, 3, 1, 4)


class KVCache:
    """Keys and values [layers, 2, B, kv_heads, capacity, head_dim]; the first `length` slots are kept tokens."""

    ragged: Ragged | None = None

    def __init__(self, data: Tensor, written: int | None = None):
        """data: finite numbers everywhere, or 0 * nan spoils the attention to slots that a mask hides. written: slots
        that may hold something; None: all."""
        self.length = 0
        self._hold(data)
        self._written = self.capacity if written is None else written

    def _hold(self, data: Tensor) -> None:
        self.data = data
        # Seen as layers write and read, so that a forward slices once for all of its layers: views are most of what
        # writing takes on small models.
        self._slots = data.permute(0, 2, 4, 1, 3, 5)  # [layers, B, capacity, 2, kv_heads, D]
        self._halves = data.flatten(0, 1)  # [layers * 2, B, kv_heads, capacity, D]
        self._place: tuple[int, int] | None = None  # where the slices begin, and how many slots they are

    @property
    def capacity(self) -> int:
        return self.data.shape[-2]

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        place = start, keys_values.shape[1]
        if place != self._place:
            self._slice(*place)
        fresh = self._fresh[layer]
        fresh.copy_(keys_values.view(fresh.shape))
        return self._seen[2 * layer], self._seen[2 * layer + 1]

    def _slice(self, start: int, length: int) -> None:
        end = start + length
        self._written = max(self._written, end)
        self._fresh = self._slots.narrow(2, start, length).unbind(0)
        self._seen = self._halves.narrow(3, 0, end).unbind(0)
        self._place = start, length

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        """Keep the first `length` slots, then those at `slots` (ascending, >= length), moved to follow them. Where none
        is kept, what another sequence left is wiped: it may hold NaN."""
        end = length + len(slots)
        if end == 0:
            with torch.inference_mode():
                self.data[..., : self._written, :].zero_()
            self._written, self._place = 0, None  # what is written next counts again
        if list(slots) != list(range(length, end)):  # a contiguous path lies in its place already
            with torch.inference_mode():
                index = torch.tensor(slots, device=self.data.device)
                self.data[..., length:end, :] = self.data.index_select(-2, index)
        self.length = end

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch only."""
        self._hold(self.data.index_select(2, rows))


class RowsCache(KVCache):
    """A cache for rows of their own lengths, which only the caller knows: `length` stays 0.

    `place` says which slots the next forward writes and how many it reads. A row's slots past its kept tokens hold what
    was last written there; a mask hides them, so that dropping tokens moves nothing. Fewer rows than were allocated may
    be in use: they are the first ones, and their memory never moves, as graphs captured over it require.
    """

    def __init__(self, data: Tensor):
        super().__init__(data)
        _, _, batch, num_kv_heads, capacity, head_dim = data.shape
        self._layers = list(data)
        # Every slot of every head as one row of a matrix, so that a layer's write is one call with an index made once.
        self._flat = [layer.view(-1, head_dim) for layer in self._layers]
        first = torch.arange(2 * batch * num_kv_heads, device=data.device) * capacity
        self._first = first.view(2, batch, num_kv_heads).transpose(0, 1).reshape(batch, 1, -1)  # [B, 1, 2 * kv_heads]

    def place(self, slots: Tensor, span: int, ragged: Ragged | None = None) -> None:
        """Writes go to slots [B, T]; reads see the first `span` slots of each of the first B rows. ragged: only these
        inputs are there, one behind the other."""
        index = self._first[: len(slots)] + slots[..., None]
        self._index = index if ragged is None else ragged.pack(index)[None]
        self._batch, self._span, self.ragged = len(slots), span, ragged

    def write(self, layer: int, start: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, T, 2 * kv_heads, D] where `place` said, ragged ones as [1, N, ..]; keys and values
        [B, kv_heads, span, D]. No use of start."""
        self._flat[layer].index_put_((self._index,), keys_values)
        keys, values = self._layers[layer].narrow(1, 0, self._batch).narrow(3, 0, self._span).unbind(0)
        return keys, values

    def row(self, index: int) -> KVCache:
        """One row as a cache of its own with no kept tokens, over the same memory."""
        return KVCache(self.data[:, :, index : index + 1])

    def wipe(self, first: int, end: int) -> None:
        """Zeros in rows [first, end): what another sequence left may be NaN, which no mask hides."""
        with torch.inference_mode():
            self.data[:, :, first:end].zero_()

    def move(self, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Copy slots old [P] of rows [P] to slots new [P] of the same rows, all of them at once."""
        with torch.inference_mode():
            self.data[:, :, rows, :, new] = self.data[:, :, rows, :, old]

    def select_rows(self, rows: Tensor) -> None:
        """Move these rows to the front, in place; none of them backwards, so that none is overwritten before it has
        moved."""
        with torch.inference_mode():
            for new, old in enumerate(rows.tolist()):
                if new != old:
                    self.data[:, :, new].copy_(self.data[:, :, old])
