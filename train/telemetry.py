"""What a training step costs: tokens and model FLOPs from shapes, time and memory from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from draftsmith.modules import flops
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM


def features_flops(model: CausalLM, lengths: Sequence[int]) -> float:
    """A frozen model's forward over documents of these lengths, up to its last hidden states."""
    config = getattr(model, "config", None)
    if isinstance(config, LlamaConfig):
        return flops.layers_forward(config, lengths)
    base = cast(Any, model).model.base_model  # a transformers model of any make (targets/hf.py)
    embeddings = base.get_input_embeddings().weight.numel()
    return flops.parameters_forward(sum(p.numel() for p in base.parameters()) - embeddings, sum(lengths))
