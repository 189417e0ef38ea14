"""Edits of a model's weights, for tests that have to notice them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.targets.llama import LlamaLM, model_from_state

State = dict[str, Tensor]


def each(change: Callable[[str, Tensor], Tensor | None], *parts: str) -> Callable[[State], None]:
    """Change the weights whose names have one of these parts."""

    def edit(state: State) -> None:
        for name in [name for name in state if any(part in name for part in parts)]:
            state[name] = change(name, state[name])

    return edit


def low_rank(share: float) -> Callable[[str, Tensor], Tensor]:
    """Add a product of rank 8, this share of a matrix in size."""

    def change(name: str, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        left, right = (torch.randn(size, 8, generator=generator) for size in weight.shape)
        product = left @ right.T
        return weight + share * weight.norm() / product.norm() * product

    return change


def edited_model(target: LlamaLM, edit: Callable[[State], None], dtype: torch.dtype, **settings: Any) -> LlamaModel:
    """A lean target with other weights or settings."""
    state = {name: value.clone() for name, value in target.model.state_dict().items()}
    edit(state)
    return model_from_state(replace(target.config, tie_embeddings=False, **settings), state, dtype)
