"""Embedding, final norm and output embedding of a target whose layers are not loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class OuterWeights:
    """Weights around a target's layers.

    embeddings, output: [V, H], which may be one tensor. bias: [V], of the output. norm, norm_bias: [H], of the final
    norm; None where the files have none.
    """

    embeddings: Tensor
    output: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    norm_bias: Tensor | None = None


class OuterLM:
    """A `CausalLM` that embeds tokens and computes logits of final states, but reads no text.

    readout: what follows the product with the output embedding. It is what config.json says until a proof of the
    teacher has chosen one (`targets.proof`).
    """

    packed = False

    def __init__(self, weights: OuterWeights, info: ModelInfo, readout: Readout):
        self.weights, self.info, self.readout = weights, info, readout
        self.device, self.dtype = weights.embeddings.device, weights.embeddings.dtype

    def embed(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        return F.embedding(torch.as_tensor(input_ids, device=self.device), self.weights.embeddings)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.readout.logits(hidden, self.weights.output, self.weights.bias)

    def lm_head_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        bias = None if self.weights.bias is None else self.weights.bias[tokens]
        return partial(self.readout.logits, weight=self.weights.output[tokens], bias=bias)

    def lm_head_weight(self) -> Tensor:
        return self.weights.output

    def session(self, *_: object, **__: object) -> NoReturn:
        found = "a target of which only the embeddings are loaded"
        raise InputError("target", found, "the whole model", "Load the whole model.")

    features: Callable[..., Tensor] = session
    logits: Callable[..., Tensor] = session
    fit_vocabulary: Callable[..., None] = session
