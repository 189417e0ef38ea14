"""Decoder layers of a target's own architecture, built by transformers from its config, for heads that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.layers import Attend, NativeLayer
from draftsmith.modules.types import InputError

# Name of our attention in transformers' registry.
CALLER = "draftsmith_caller"

NO_VOCABULARY = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# Of whole models and their files.
UNRELATED = ("architectures", "dtype", "transformers_version", "quantization_config", "id2label", "label2id")


@dataclass(frozen=True)
class NativeShape:
    """Sizes of a layer's attention. head_dim: of keys, or of values where these are wider. window: None without one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


def caller_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as the caller of the layer says (transformers' attention interface)."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # [B, T, heads, D]
    return attend(query, key, value, scaling, s_aux), None


def layer_settings(text: Mapping[str, Any], kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with one layer of a target's and no vocabulary, as JSON values.

    text: settings of the target's text model, with its `model_type`. kind: settings by which its layers differ.

    Raises:
        InputError: transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        known = AutoConfig.for_model(text["model_type"])
        # Published files spell a rotation in other fields than transformers 5 (rope_theta, rope_scaling).
        read = type(known).from_dict(dict(text)).to_dict()
    except Exception as error:  # each family refuses in its own way
        found, expected = f"{text.get('model_type')} ({error})", "an architecture and settings that transformers has"
        raise InputError("target", found, expected, "Correct config.json, or update transformers.") from error
    # GLM-4.5's class reads head_dim and does not list it.
    kept = ({*text, "rope_parameters"} & (known.to_dict().keys() | {"head_dim"})) - {*UNRELATED}
    own = {name: read[name] for name in sorted(kept)}
    return {**own, "model_type": text["model_type"], **NO_VOCABULARY, "num_hidden_layers": 1, **kind}


def native_layer(settings: Mapping[str, Any], num_positions: int) -> tuple[NativeLayer, Any]:
    """Build a decoder layer, and a norm of its width, with random weights.

    settings: of a model of this layer alone, as transformers' config classes take them. num_positions: of its tables.

    Raises:
        InputError: transformers does not know the architecture, or builds it in another way.
    """
    # The registry is the only place where a layer looks for its attention.
    from transformers import AttentionInterface, AutoConfig, AutoModel

    AttentionInterface.register(CALLER, caller_attention)
    try:
        config = AutoConfig.for_model(**settings)
        model = AutoModel.from_config(config, attn_implementation=CALLER)
        layer, norm = model.layers[0], model.norm
        # Some families have a rotation for each kind of layer.
        kind = getattr(config, "layer_types", None) or [None]
        nested = isinstance((getattr(config, "rope_parameters", None) or {}).get(kind[0]), dict)
        positions = torch.arange(num_positions, device=norm.weight.device)[None]
        cos, sin = model.rotary_emb(norm.weight, positions, *([kind[0]] if nested else []))  # [1, positions, D]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{settings.get('model_type')} ({error})"
        remedy = "Update transformers, or train an eagle3 head."
        raise InputError("target", found, "an architecture whose layers transformers builds", remedy) from error
    return NativeLayer(layer, cos[0].detach(), sin[0].detach()), norm


def native_shape(settings: Mapping[str, Any]) -> NativeShape:
    """Return the sizes of a layer's attention, as it calls it; arguments and errors as of `native_layer`."""
    with torch.device("meta"):
        layer, norm = native_layer(settings, 1)
        query, key, value = layer.calls(
            norm.weight.new_empty(1, len(norm.weight)), layer.cos[:, None], layer.sin[:, None]
        )
    window = getattr(layer.layer.self_attn, "sliding_window", None)
    return NativeShape(query.shape[-2], key.shape[-2], max(key.shape[-1], value.shape[-1]), window)
