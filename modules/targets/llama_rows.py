"""Several sequences of a `LlamaLM` at once, each of its own length: the session of the batched decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.modules.graphs import Graphed
from draftsmith.modules.lean_rows import RowsStack
from draftsmith.modules.targets.base import Scores

if TYPE_CHECKING:
    from draftsmith.modules.targets.llama import LlamaLM


class LlamaRows:
    """A `RowsSession` over a `LlamaLM`; on CUDA its forwards are graphs."""

    def __init__(self, lm: LlamaLM, batch: int, capacity: int, static: bool | None = None):
        """static: fixed shapes; None takes them on CUDA only."""
        self._lm, self.batch, self.capacity = lm, batch, capacity
        self.static = lm.device.type == "cuda" if static is None else static
        self._rows = RowsStack(lm.stack, batch, capacity)
        self._forward = Graphed(self._read)

    @torch.inference_mode()
    def prefill(self, row: int, prompt: Sequence[int]) -> Scores:
        lm = self._lm
        x = lm.embed(torch.tensor(prompt, device=lm.device))
        hidden = lm.norm(lm.stack.chain(x, self._rows.fresh(row)))
        return Scores(lm.lm_head(hidden[-1:]), hidden)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, starts: Tensor, end: int, num_logits: int = 1) -> tuple[Tensor, Tensor]:
        span = self._rows.span(end, self.static)
        logits, features = self._forward(tokens, starts, static=(span, num_logits))
        return logits, features

    def _read(self, tokens: Tensor, starts: Tensor, span: int, num_logits: int) -> tuple[Tensor, Tensor]:
        lm = self._lm
        hidden = lm.norm(self._rows.forward(lm.embed(tokens), starts, span))
        return lm.lm_head(hidden[:, hidden.shape[1] - num_logits :]), hidden

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        self._rows.select(rows)
