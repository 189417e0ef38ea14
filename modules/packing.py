"""Documents laid end to end in one row, without padding; none of them attends to another.

Everything that works on single tokens (projections, MLP, lm_head, losses) runs on the flat row [1, N, ...]. Attention
alone lays the documents side by side, [D, L] padded at the right, where a plain causal mask suffices. With documents of
similar length that padding is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def side_by_side(self, flat: Tensor) -> Tensor:
        """Lay [1, N, ...] out as [D, L, ...]; padding is arbitrary."""
        return flat[0].index_select(0, self.rows.flatten()).view(*self.rows.shape, *flat.shape[2:])

    def end_to_end(self, padded: Tensor) -> Tensor:
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
