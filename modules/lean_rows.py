"""Lean layers over rows of different lengths: `LeanStack.chain` for several sequences, in shapes that may be fixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.kv_cache import KVCache, RowsCache
from draftsmith.modules.lean import LeanStack, as_bias, tree_mask

SPAN_BUCKET = 256  # slots that are looked at come in multiples of this
ALIGNMENT = 8  # of a mask's rows, which attention kernels on a GPU ask for; SPAN_BUCKET is a multiple of it


class RowsStack:
    """A `LeanStack` over a `RowsCache`. Which slots of a row are kept is the caller's to know: a forward is told where
    each row goes on, and what lies beyond is written over."""

    def __init__(self, stack: LeanStack, batch: int, capacity: int):
        """capacity: most tokens a row may keep, drafts included. Inputs past it are harmless and their outputs void."""
        self._stack, self._capacity = stack, capacity
        config = stack.config
        # One slot more at least, for the inputs past the capacity: rows padded to a common width have them.
        slots = -(-(capacity + 1) // ALIGNMENT) * ALIGNMENT
        self._cache = RowsCache(
            len(stack.layers), batch, config.num_kv_heads, slots, config.head_dim, stack.dtype, stack.device
        )
        self._slots = torch.arange(slots, device=stack.device)

    def forward(self, x: Tensor, starts: Tensor, span: int) -> Tensor:
        """x [B, n, H], row b fed after its first starts[b] tokens, int64 [B] -> [B, n, H] before any final norm.

        span: cached slots that are looked at; no less than any row's start + n, unless that is past the capacity.
        """
        stack = self._stack
        positions = (starts[:, None] + torch.arange(x.shape[1], device=x.device)).clamp_max(self._capacity)
        slots = self._slots[:span]
        visible = slots <= positions[..., None]
        if stack.config.sliding_window is not None:
            visible &= slots > positions[..., None] - stack.config.sliding_window
        rotated = positions.clamp_max(len(stack.cos) - 1)
        self._cache.place(positions, span)
        return stack.run(
            x, stack.cos[rotated], stack.sin[rotated], self._cache, as_bias(visible, stack.dtype)[:, None], False
        )

    def nodes(self, x: Tensor, positions: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
        """Any T inputs x [T, H] of a single row, written to slots [T]: what follows from `fixed_inputs`."""
        stack = self._stack
        self._cache.place(slots[None], bias.shape[-1])
        return stack.run(x, stack.cos[positions], stack.sin[positions], self._cache, bias, False)

    def span(self, end: int, static: bool) -> int:
        """Slots to look at where the longest row ends at `end`. static: one of few widths, so that shapes recur."""
        return min(fixed_span(end) if static else end, len(self._slots))

    def row(self, index: int) -> KVCache:
        """This row's slots as a cache with no kept tokens, for inputs that are read without padding."""
        return self._cache.row(index)

    def fresh(self, index: int) -> KVCache:
        """The same, wiped: for a new sequence."""
        cache = self.row(index)
        cache.keep(0)
        return cache

    def select(self, rows: Tensor) -> None:
        """Keep these rows only (ascending indices [B'])."""
        self._cache.select_rows(rows)


def bucket(count: int) -> int:
    """The power of two that inputs are padded to."""
    return 1 << (count - 1).bit_length()


def fixed_span(end: int) -> int:
    return -(-end // SPAN_BUCKET) * SPAN_BUCKET


def fixed_inputs(stack: LeanStack, parents: Sequence[int], length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [W], slots [W] and attention bias [W, S] of a tree fed after `length` kept tokens and padded to `width`
    inputs, as `RowsStack.nodes` takes them; S is a multiple of SPAN_BUCKET.

    parents: as `LeanStack.tree` takes them. Padding sees itself and the kept tokens, and nothing sees it.
    """
    padded = [*parents, *[-1] * (width - len(parents))]
    cpu = torch.device("cpu")  # made on the host: on a GPU every small step would be a launch
    depths, visible = tree_mask(padded, length, cpu)
    positions = (length + depths).clamp_max(len(stack.cos) - 1)
    if stack.config.sliding_window is not None:
        visible &= positions[:, None] - torch.cat([torch.arange(length), positions]) < stack.config.sliding_window
    bias = F.pad(as_bias(visible, stack.dtype), (0, fixed_span(length + width) - length - width), value=-torch.inf)
    slots = torch.arange(length, length + width)
    to = stack.device
    return positions.to(to), slots.to(to), bias.to(to)
