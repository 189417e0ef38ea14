"""Documents laid end to end in one row: no padding is computed on, and none of them sees another.

Everything that works on tokens one by one (projections, MLP, lm_head, losses) runs on the flat row [1, N, ...].
Attention alone lays the documents side by side, [D, L] padded at the right, where the plain causal mask is all it
needs; with documents of like length that padding is small, and it is attention's only.
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

    lengths: of each document, at least 1. rows: [D, L] int64, where in the flat row a token of a document is; 0, any
    token, on padding. flat: [N] int64, where in the D * L padded tokens a token of the flat row is.
    """

    lengths: tuple[int, ...]
    rows: Tensor
    flat: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        sizes = torch.tensor(list(lengths), dtype=torch.int64)  # on the host, for which a device would have to wait
        columns = torch.arange(max(lengths, default=0))
        real = columns < sizes[:, None]
        rows = torch.where(real, (sizes.cumsum(0) - sizes)[:, None] + columns, 0)
        return cls(tuple(lengths), to_device(rows, device), to_device(true_places(real), device))

    def side_by_side(self, flat: Tensor) -> Tensor:
        """[1, N, ...] -> [D, L, ...]; what lies in the padding is arbitrary."""
        return flat[0].index_select(0, self.rows.flatten()).view(*self.rows.shape, *flat.shape[2:])

    def end_to_end(self, padded: Tensor) -> Tensor:
        """[D, L, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.flat)[None]

    def heads_side_by_side(self, flat: Tensor) -> Tensor:
        """Queries, keys or values [1, heads, N, D_head] -> [D, heads, L, D_head]."""
        return self.side_by_side(flat.transpose(1, 2)).transpose(1, 2)


def documents_of(lengths: Sequence[int] | None, device: torch.device) -> Documents | None:
    """None for a batch of one sequence a row."""
    return None if lengths is None else Documents.of(lengths, device)
