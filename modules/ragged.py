"""Rows of unequal numbers of inputs, read together without padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

# Time of attention in that of one more query of a row: of a row among others that are padded, and of a row alone.
PADDED_ROW, ROW_ALONE = 6, 11


class Ragged:
    """Rows of different lengths, laid out one behind the other: all but attention reads them so, without padding.

    Attention pads the rows that are short, the others and those that idle with them, and reads long ones one by one.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        """counts: inputs of each row, N in all, none where a row idles."""
        self.batch, self.width = len(counts), max(counts)
        self._index = torch.tensor(_places(counts, self.width), device=device)
        width = self._short = min({0, *counts}, key=lambda width: _attention_time(counts, width))
        ends = list(accumulate(counts))
        parts = [(row, end - count, end) for row, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
        self._alone = [part for part in parts if part[2] - part[1] > width]
        short = [i for _, start, end in parts if end - start <= width for i in range(start, end)]
        self._own = torch.tensor(short, device=device)  # in [N]
        padded = _places([count if count <= width else 0 for count in counts], width)
        self._padded = torch.tensor(padded, device=device)  # their places in [batch * width]

    def spread(self, packed: Tensor) -> Tensor:
        """[N, ..] -> [batch, width, ..], zeros elsewhere."""
        return _spread(packed, self._index, self.batch, self.width)

    def pack(self, padded: Tensor) -> Tensor:
        """[batch, width, ..] -> [N, ..]."""
        return padded.flatten(0, 1).index_select(0, self._index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, grouped: bool) -> Tensor:
        """Attention of queries [N, heads, D] to their own rows' keys and values [batch, kv_heads, S, D]: [N, heads, D].

        mask: added to scores, [batch, 1, width, S].
        """
        attention, made = partial(F.scaled_dot_product_attention, enable_gqa=grouped), queries
        if self._short:
            own = queries.index_select(0, self._own) if self._alone else queries
            padded = _spread(own, self._padded, self.batch, self._short).transpose(1, 2)
            found = attention(padded, keys, values, attn_mask=mask[:, :, : self._short]).transpose(1, 2)
            made = found.flatten(0, 1).index_select(0, self._padded)
        if self._alone:
            made = torch.empty_like(queries).index_copy_(0, self._own, made) if self._short else torch.empty_like(made)
        for row, start, end in self._alone:
            one = slice(row, row + 1)
            found = attention(
                queries[None, start:end].transpose(1, 2), keys[one], values[one], attn_mask=mask[one, :, : end - start]
            )
            made[start:end] = found[0].transpose(0, 1)
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
