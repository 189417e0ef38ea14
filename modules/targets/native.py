"""Decoder layers of a target's own architecture, built by transformers from its config, for heads that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.layers import Attend
from draftsmith.modules.types import InputError

# Name of our attention in transformers' registry.
CALLER = "draftsmith_caller"

NO_VOCABULARY = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# Of whole models and their files.
UNRELATED = ("architectures", "dtype", "transformers_version", "quantization_config", "id2label", "label2id")


@dataclass(frozen=True)
class NativeLayer:
    """Decoder layer of another architecture, as a `layers.Layer`.

    layer: module with `input_layernorm` and `self_attn`, called as transformers' layers are.
    """

    layer: Any

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self._call(self.layer, x, cos, sin, attend).view(x.shape)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.calls(x, cos, sin)[1:]

    def calls(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query, key and value that the layer calls its attention with; arguments as of a call."""
        given: list[tuple[Tensor, Tensor, Tensor]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
            given.append((query, key, value))
            return torch.zeros_like(query)

        self._call(self.layer.self_attn, self.layer.input_layernorm(x), cos, sin, attend)
        return given[0]

    @staticmethod
    def _call(module: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Any:
        # transformers takes [B, T, H] and [B or 1, T, D''].
        x, *tables = (part[(None,) * (3 - part.dim())] for part in (x, cos.squeeze(-2), sin.squeeze(-2)))
        return module(x, position_embeddings=tuple(tables), attention_mask=None, attend=attend)


class Native(NamedTuple):
    """A layer, a norm of its width, and its rotary tables [positions, D'']."""

    layer: NativeLayer
    norm: nn.Module
    cos: Tensor
    sin: Tensor


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
    **others: object,
) -> tuple[Tensor, None]:
    """Attend as the caller of the layer says (transformers' attention interface)."""
    # Kernels and caches have one width, and the factor of it.
    width = max(key.shape[-1], value.shape[-1])
    if scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    query, key, wide_value = (F.pad(part, (0, width - part.shape[-1])).transpose(1, 2) for part in (query, key, value))
    return attend(query, key, wide_value, s_aux)[..., : value.shape[-1]], None


def layer_settings(text: Mapping[str, object], kind: Mapping[str, object]) -> dict[str, object]:
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


def native_layer(settings: Mapping[str, object], num_positions: int) -> Native:
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
    return Native(NativeLayer(layer), norm, cos[0].detach(), sin[0].detach())


def native_sizes(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the sizes of a layer's attention, as it calls it, as `LlamaConfig` names them; arguments and errors as of
    `native_layer`. head_dim is that of keys, or of values where these are wider."""
    with torch.device("meta"):
        layer, norm, cos, sin = native_layer(settings, 1)
        x = cos.new_empty(1, sum(weight.numel() for weight in norm.parameters()))
        query, key, _ = layer.calls(x, cos[:, None], sin[:, None])
    sizes = {"num_heads": query.shape[-2], "num_kv_heads": key.shape[-2], "head_dim": key.shape[-1]}
    return {**sizes, "sliding_window": getattr(layer.layer.self_attn, "sliding_window", None)}
