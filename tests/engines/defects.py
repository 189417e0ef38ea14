"""Defects of EAGLE-1 and EAGLE-3 directories: for our readers, which name them, and for the engines, which decide.

`directories.py` writes every export with every defect of its case, and what `draftsmith check` says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Changes the tensors of the file; the second are the target's embed_tokens and lm_head [V, H].
Edit = Callable[[dict[str, Tensor], Mapping[str, Tensor]], None]
IDS = "eagle_aux_hidden_state_layer_ids"


def nothing(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
    pass


@dataclass(frozen=True)
class Defect:
    """An edit of an exported directory. config: fields to set, `...` removes one. case: of `directories.py`."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Edit = nothing
    case: str = "llama"

    def apply(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the broken config and tensors."""
        changed = {name: value for name, value in {**config, **self.config}.items() if value is not ...}
        edited = dict(tensors)
        self.tensors(edited, tables)
        return changed, edited


def added(name: str) -> Edit:
    """Add a tensor [H] that no export has, none of it zero."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        size = tables["lm_head"].shape[1]
        tensors[name] = torch.randn(size, generator=torch.Generator().manual_seed(3))

    return edit


def lost(*names: str) -> Edit:
    """Remove those of these tensors that the export has."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name, None)

    return edit


def renamed(start: str, by: str) -> Edit:
    """Let names that begin with `start` begin with `by` instead."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[by + name.removeprefix(start)] = tensors.pop(name)

    return edit


def table(name: str, by: Callable[[Mapping[str, Tensor]], Tensor]) -> Edit:
    """Add a tensor that is made of the target's tables."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        tensors[name] = by(tables).contiguous().clone()

    return edit


def change(end: str, by: Callable[[Tensor], Tensor]) -> Edit:
    """Replace the tensors whose names end so by a function of their values."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = by(tensors[name]).contiguous()

    return edit


def both_places(*numbers: int) -> dict[str, object]:
    """Layer ids in both places where systems look for them."""
    return {IDS: list(numbers), "eagle_config": {IDS: list(numbers), "use_aux_hidden_state": True}}


ATTENTION = "layers.0.self_attn."
EAGLE = {
    "none": Defect(),
    "lm_head": Defect(tensors=table("lm_head.weight", lambda tables: tables["lm_head"].flip(0))),
    "input-norm": Defect(tensors=added("layers.0.input_layernorm.weight")),
    "q-norm": Defect(tensors=added(ATTENTION + "q_norm.weight")),
    "prefix": Defect(tensors=renamed("", "model.")),
    "no-norm": Defect(tensors=lost("layers.0.post_attention_layernorm.weight")),
    "no-bias": Defect({"bias": ...}),
    "attention_bias": Defect({"attention_bias": True}),
    "qkv-biases-unannounced": Defect({"attention_bias": ..., "qkv_bias": ...}, case="qwen2"),
    "larger-head_dim": Defect({"head_dim": 16}),
    "class-of-sglang": Defect({"architectures": ["LlamaForCausalLMEagle"]}),
    "layer_types": Defect({"layer_types": ["full_attention"]}),
    "tie_word_embeddings": Defect({"tie_word_embeddings": True}),
    "max_position_embeddings": Defect({"max_position_embeddings": 16}),
    "no-rms_norm_eps": Defect({"rms_norm_eps": 1e-3}),
}
EAGLE3 = {
    "none": Defect(case="reduced"),
    "ids-by-the-other-count": Defect(both_places(1, 3, 4), case="reduced"),
    "ids-at-the-top-only": Defect({IDS: [1, 3, 6], "eagle_config": ...}, case="layers"),
    "ids-in-another-order": Defect({IDS: [6, 1, 3]}, case="layers"),
    "ids-in-d2t": Defect(tensors=change("d2t", lambda offsets: offsets + torch.arange(len(offsets))), case="reduced"),
    "no-d2t": Defect(tensors=lost("d2t"), case="reduced"),
    "no-draft_vocab_size": Defect({"draft_vocab_size": ...}, case="reduced"),
    "no-hidden_norm": Defect(
        tensors=lost("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"), case="reduced"
    ),
    "prefix": Defect(tensors=renamed("", "model."), case="reduced"),
    "midlayer": Defect(tensors=renamed("layers.0", "midlayer"), case="reduced"),
    "layers.0": Defect(tensors=renamed("midlayer", "layers.0"), case="reduced"),
    "halves": Defect(
        tensors=change("q_proj.weight", lambda w: torch.cat(w.chunk(2, dim=1)[::-1], dim=1)), case="reduced"
    ),
    "norm_before_residual": Defect({"norm_before_residual": True}, case="reduced"),
    "norm_before_residual-unsaid": Defect({"norm_before_residual": ...}, case="residual"),
    "norm_output": Defect({"norm_output": True}, case="reduced"),
    "no-window": Defect({"layer_types": ...}, case="window"),
    "a-window": Defect({"layer_types": ["sliding_attention"], "sliding_window": 12}, case="reduced"),
    "no-later-norm": Defect(tensors=lost("layers.1.hidden_norm.weight", "layers.2.hidden_norm.weight"), case="deep"),
    "fewer-layers": Defect({"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}, case="deep"),
    "rope-of-the-target": Defect({"rope_theta": 10000.0, "rope_parameters": ..., "rope_scaling": ...}, case="theta"),
}
DEFECTS: dict[str, dict[str, Defect]] = {"eagle": EAGLE, "eagle3": EAGLE3, "dflash": {}, "dflash2": {}, "dspark": {}}
