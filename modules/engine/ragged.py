"""Rows of unequal numbers of inputs, read together without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from draftsmith.modules.engine.attention import attend
from draftsmith.modules.transfer import to_device_together

# Time of attention in that of one more query of a row: of a row among others that are padded, and of a row alone.
PADDED_ROW, ROW_ALONE = 6, 11


class Ragged:
    """Rows of different lengths, laid out one behind the other: all but attention reads them so, without padding.

    Attention pads the rows that are short, the others and those that idle with them, and reads long ones one by one.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        """counts: inputs of each row, N in all, none where a row idles."""
        self.batch, self.width = len(counts), max(counts)
        index = _places(counts, self.width)
        width = self._short = min({0, *counts}, key=lambda width: _attention_time(counts, width))
        ends = list(accumulate(counts))
        parts = [(row, end - count, end) for row, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
        self._alone = [part for part in parts if part[2] - part[1] > width]
        short = [i for _, start, end in parts if end - start <= width for i in range(start, end)]
        padded = _places([count if count <= width else 0 for count in counts], width)
        # Of all inputs their places in [batch * width]; of those in short rows places in [N], and in [batch * short].
        self._index, self._own, self._padded = to_device_together([index, short, padded], device)

    def spread(self, packed: Tensor) -> Tensor:
        """[N, ..] -> [batch, width, ..], zeros elsewhere."""
        return _spread(packed, self._index, self.batch, self.width)

    def pack(self, padded: Tensor) -> Tensor:
        """[batch, width, ..] -> [N, ..]."""
        return padded.flatten(0, 1).index_select(0, self._index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, groups: int, mask: Tensor) -> Tensor:
        """Attention of queries [N, heads, D] to their own rows' keys and values [batch, kv_heads, S, D]: [N, heads, D].

        mask: of [batch, 1, width, S], `attention.prepared`.
        """
        made, lines = queries, mask.shape[2] // self.width  # of the mask, for a query
        if self._short:
            own = queries.index_select(0, self._own) if self._alone else queries
            padded = _spread(own, self._padded, self.batch, self._short)
            found = attend(padded, keys, values, groups, mask[:, :, : self._short * lines])
            made = found.flatten(0, 1).index_select(0, self._padded)
        if self._alone:
            made = torch.empty_like(queries).index_copy_(0, self._own, made) if self._short else torch.empty_like(made)
        for row, start, end in self._alone:
            one = slice(row, row + 1)
            of_row = mask[one, :, : (end - start) * lines]
            made[start:end] = attend(queries[None, start:end], keys[one], values[one], groups, of_row)[0]
        return made


def _places(counts: Sequence[int], width: int) -> list[int]:
    """Where the inputs of rows lie in [rows * width]."""
    return [row * width + i for row, count in enumerate(counts) for i in range(count)]


def _spread(packed: Tensor, places: Tensor, batch: int, width: int) -> Tensor:
    padded = packed.new_zeros(batch * width, *packed.shape[1:])
    return padded.index_copy_(0, places, packed).unflatten(0, (batch, width))


def _attention_time(counts: Sequence[int], width: int) -> int:
    """Of rows padded to this width, 0 for none, and the longer ones one by one."""
    padded = len(counts) * (PADDED_ROW + width) if width else 0
    return padded + sum(ROW_ALONE + count for count in counts if count > width)
