"""One sequence of a `LlamaLM` in calls of few shapes: chains and trees for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.modules.graphs import Graphed
from draftsmith.modules.lean_rows import RowsStack, bucket, fixed_inputs, fixed_span
from draftsmith.modules.targets.base import Scores

if TYPE_CHECKING:
    from draftsmith.modules.targets.llama import LlamaLM

MAX_WIDTH = 256  # what is longer is a prompt, and read once


class FixedShapeSession:
    """A `Session` that pads what it is fed to a power of two and looks at a multiple of 256 slots, so that shapes recur
    and a graph captured for one call serves later ones. Scores are good until the next call on CUDA."""

    def __init__(self, lm: LlamaLM, capacity: int):
        self._lm, self.length = lm, 0
        self._rows = RowsStack(lm.stack, 1, fixed_span(capacity + MAX_WIDTH))
        self._forward = Graphed(self._read)

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], parents: Sequence[int] | None = None, num_logits: int = 1) -> Scores:
        count = len(tokens)
        if count > MAX_WIDTH:
            hidden = self._read_long(tokens, parents)
            scores = Scores(self._lm.lm_head(hidden[count - num_logits :]), hidden)
        else:
            inputs = fixed_inputs(self._lm.stack, parents or range(-1, count - 1), self.length, bucket(count))
            ids = torch.tensor([*tokens, *[0] * (bucket(count) - count)]).to(self._lm.device, non_blocking=True)
            logits, hidden = self._forward(ids, *inputs)
            scores = Scores(logits[count - num_logits : count], hidden[:count])
        self.length += count
        return scores

    def _read(self, ids: Tensor, positions: Tensor, slots: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        lm = self._lm
        hidden = lm.norm(self._rows.nodes(lm.embed(ids), positions, slots, bias))
        return lm.lm_head(hidden), hidden

    def _read_long(self, tokens: Sequence[int], parents: Sequence[int] | None) -> Tensor:
        lm = self._lm
        x = lm.embed(torch.tensor(tokens, device=lm.device))
        cache = self._rows.row(0)
        cache.length = self.length
        hidden = lm.stack.chain(x, cache) if parents is None else lm.stack.tree(x, parents, cache)
        return lm.norm(hidden)

    @torch.inference_mode()
    def graft(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        lm, cache = self._lm, self._rows.row(0)
        cache.length = self.length
        self.length += len(tokens)
        return lm.norm(lm.stack.graft(lm.embed(tokens), positions, visible, cache))

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        cache = self._rows.row(0)
        cache.keep(length, slots)
        self.length = cache.length
