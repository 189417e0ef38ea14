"""A target without its layers: embeddings and output embedding, for heads that learn from states of another process."""

from __future__ import annotations

from typing import NoReturn

import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.targets.base import ModelInfo, Session
from draftsmith.modules.types import InputError


class OuterLM:
    """A `CausalLM` that embeds tokens and computes logits of final states, but reads no text.

    embeddings, output: [V, H], which may be one tensor.
    """

    packed = False

    def __init__(self, embeddings: Tensor, output: Tensor, info: ModelInfo):
        self.embeddings, self.output, self.info = embeddings, output, info
        self.device, self.dtype = embeddings.device, embeddings.dtype

    def embed(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embeddings)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output)

    def lm_head_weight(self) -> Tensor:
        return self.output

    def session(self, rows: int, capacity: int, capture: tuple[int, ...] = (), static: bool | None = None) -> Session:
        self._refuse()

    def features(self, input_ids: Tensor, position_ids: Tensor | None = None, capture: tuple[int, ...] = ()) -> Tensor:
        self._refuse()

    def fit_vocabulary(self, vocab_size: int) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        found = "a target of which only the embeddings are loaded"
        raise InputError("target", found, "the whole model", "Load the whole model.")
