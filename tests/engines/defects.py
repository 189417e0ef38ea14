"""What goes wrong in an EAGLE-1 directory: each defect once, for our readers, which predict what an engine makes of it
(`directories.py`), and for the engines, which are held to the prediction.

Not here, since an engine without a GPU and its own attention cannot be asked: quantised weights, sliding windows,
attention that is not causal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Changes the tensors of the file; the second are the target's embed_tokens and lm_head [V, H].
Edit = Callable[[dict[str, Tensor], Mapping[str, Tensor]], None]


def nothing(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
    pass


@dataclass(frozen=True)
class Defect:
    """An edit of an exported directory. config: fields that are set, `...` takes one out. case: of `directories.py`."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Edit = nothing
    case: str = "llama"

    def apply(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The broken config and tensors."""
        changed = {name: value for name, value in {**config, **self.config}.items() if value is not ...}
        edited = dict(tensors)
        self.tensors(edited, tables)
        return changed, edited


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def added(name: str, *rest: int) -> Edit:
    """A tensor [H, *rest] that no export has, none of it zero."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        tensors[name] = rand(tables["lm_head"].shape[1], *rest)

    return edit


def lost(name: str) -> Edit:
    """Without that tensor, where the export has it."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        tensors.pop(name, None)

    return edit


def renamed(start: str, by: str) -> Edit:
    """Names that begin with `start` begin with `by` instead."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[by + name.removeprefix(start)] = tensors.pop(name)

    return edit


def table(name: str, make: Callable[[Mapping[str, Tensor]], Tensor]) -> Edit:
    """A tensor that is made of the target's tables."""

    def edit(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        tensors[name] = make(tables).contiguous().clone()

    return edit


def fused_qkv(tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> None:
    """One tensor for q, k and v, under the name that vLLM and SGLang have for it in memory."""
    parts = [tensors.pop(f"layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)


ATTENTION, MLP = "layers.0.self_attn.", "layers.0.mlp."
DEFECTS: dict[str, Defect] = {
    "none": Defect(),
    # Tensors that have no place.
    "lm_head": Defect(tensors=table("lm_head.weight", lambda tables: rand(*tables["lm_head"].shape))),
    "lm_head-of-the-target": Defect(tensors=table("lm_head.weight", lambda tables: tables["lm_head"])),
    "lm_head-under-model": Defect(tensors=table("model.lm_head.weight", lambda tables: tables["lm_head"])),
    "input-norm": Defect(tensors=added("layers.0.input_layernorm.weight")),
    "final-norm": Defect(tensors=added("norm.weight")),
    "q-norm": Defect(tensors=added(ATTENTION + "q_norm.weight")),
    "q-norm-bias": Defect(tensors=added(ATTENTION + "q_norm.bias")),
    "prefix": Defect(tensors=renamed("", "model.")),
    "midlayer": Defect(tensors=renamed("layers.0", "midlayer")),
    "renamed-mlp": Defect(tensors=renamed(MLP + "gate_proj", MLP + "w1")),
    "fused-qkv": Defect(tensors=fused_qkv),
    "fused-qkv-too-long": Defect({"head_dim": 4}, fused_qkv),
    "rotary-buffer": Defect(tensors=added(ATTENTION + "rotary_emb.inv_freq")),
    "more-layers": Defect({"num_hidden_layers": 1}, case="two-layers"),
    # Places that have no tensor.
    "no-fc": Defect(tensors=lost("fc.weight")),
    "no-q": Defect(tensors=lost(ATTENTION + "q_proj.weight")),
    "no-o": Defect(tensors=lost(ATTENTION + "o_proj.weight")),
    "no-norm": Defect(tensors=lost("layers.0.post_attention_layernorm.weight")),
    "no-fc-bias": Defect(tensors=lost("fc.bias")),
    "fewer-layers": Defect({"num_hidden_layers": 2}),
    "no-q-bias": Defect(tensors=lost(ATTENTION + "q_proj.bias"), case="qwen2"),
    "no-o-bias": Defect(tensors=lost(ATTENTION + "o_proj.bias"), case="qwen2"),
    # Biases and their switches.
    "fc-bias": Defect(tensors=added("fc.bias")),
    "fc-bias-zero": Defect(tensors=table("fc.bias", lambda tables: torch.zeros(tables["lm_head"].shape[1]))),
    "fc-bias-and-bias": Defect({"bias": True}, added("fc.bias")),
    "bias": Defect({"bias": True}),
    "no-bias": Defect({"bias": ...}),
    "attention_bias": Defect({"attention_bias": True}),
    "qkv_bias": Defect({"qkv_bias": True}),
    "bias-without-qkv_bias": Defect({"bias": True, "qkv_bias": False}),
    "mlp_bias": Defect({"mlp_bias": True}),
    "q-bias": Defect(tensors=added(ATTENTION + "q_proj.bias")),
    "down-bias": Defect(tensors=added(MLP + "down_proj.bias")),
    "qkv-biases-unannounced": Defect({"attention_bias": ..., "qkv_bias": ...}, case="qwen2"),
    "qkv-biases-as-attention_bias": Defect({"attention_bias": True, "qkv_bias": ...}, case="qwen2"),
    "qkv-biases-as-qkv_bias": Defect({"attention_bias": False, "qkv_bias": True}, case="qwen2"),
    # Tables and shapes.
    "embedding-of-the-target": Defect(tensors=table("embed_tokens.weight", lambda tables: tables["embed_tokens"])),
    "embedding": Defect(tensors=table("embed_tokens.weight", lambda tables: rand(*tables["lm_head"].shape))),
    "short-embedding": Defect(tensors=table("embed_tokens.weight", lambda tables: tables["embed_tokens"][:-3])),
    "fc-of-one-width": Defect(tensors=table("fc.weight", lambda tables: rand(*[tables["lm_head"].shape[1]] * 2))),
    "larger-head_dim": Defect({"head_dim": 16}),
    "smaller-head_dim": Defect({"head_dim": 4}),
    "fewer-heads": Defect({"num_attention_heads": 2}),
    "smaller-intermediate_size": Defect({"intermediate_size": 48}),
    "larger-intermediate_size": Defect({"intermediate_size": 80}),
    "no-num_key_value_heads": Defect({"num_key_value_heads": ...}),
    "vocab_size": Defect({"vocab_size": 300}),
    "short-vocabulary-and-embedding": Defect(
        {"vocab_size": 300}, table("embed_tokens.weight", lambda tables: tables["embed_tokens"][:300])
    ),
    "draft_vocab_size": Defect({"draft_vocab_size": 300}),
    "hot_vocab_size": Defect({"hot_vocab_size": 300}),
    # Other fields.
    "class-of-sglang": Defect({"architectures": ["LlamaForCausalLMEagle"]}),
    "class-of-vllm": Defect({"architectures": ["LlamaForCausalLM"]}),
    "no-class": Defect({"architectures": ...}),
    "model_type": Defect({"model_type": "qwen2"}),
    "layer_types": Defect({"layer_types": ["full_attention"]}),
    "hidden_act": Defect({"hidden_act": "gelu"}),
    "tie_word_embeddings": Defect({"tie_word_embeddings": True}),
    "max_position_embeddings": Defect({"max_position_embeddings": 16}),
    "logit_scale": Defect({"logit_scale": 0.5}),
    "no-rms_norm_eps": Defect({"rms_norm_eps": ...}),
}
