"""Llama's layers in other systems' directories: fields of `config.json`, and the order of the rows of q and k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from draftsmith.modules.formats.base import NotReadHere, Raw, layer_types
from draftsmith.modules.llama_config import (
    BASE,
    PARTIAL,
    ROPE_KINDS,
    LlamaConfig,
    RopeScaling,
    RotarySettings,
    config_object,
    positive,
    rope_number,
)
from draftsmith.modules.rotary import rope_attention_scale, rope_frequencies
from draftsmith.modules.types import InputError

Fields = dict[str, object]  # of a `config.json`
IDS = "eagle_aux_hidden_state_layer_ids"


def architecture(raw: Raw) -> str:
    """Return the first entry of `architectures`, or an empty string."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.isprintable() else ""


def inner_object(raw: Raw, name: str) -> Raw:
    """Return an object inside a `config.json`; an empty one if it is absent or of another type."""
    inner = raw.get(name)
    return inner if isinstance(inner, Mapping) else {}


def flat(config: Raw) -> Raw:
    """Return a `config.json` with the layer's fields at the top; speculators keep them inside an object."""
    return {**inner_object(config, "transformer_layer_config"), **config}


def layer_ids(raw: Raw, place: str = "", field: str = IDS) -> tuple[int, ...] | None:
    """Return the layer ids in an object of `config.json`; "" is the top. None if it has none."""
    ids = (inner_object(raw, place) if place else raw).get(field)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise InputError(f"config.json, {field}", repr(ids), "a list of integers", "Correct config.json.")
    return tuple(ids)


def layer_windows(raw: Raw, num_layers: int, field: str = "sliding_window") -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window, most keys that a token attends to, itself included, and the layers without it.

    None and no layers: there is no window. field: has its size.

    Raises:
        InputError: layers are missing, or have a window of no size.
    """
    kinds = layer_types(raw)[:num_layers]
    if "sliding_attention" not in kinds:
        return None, ()
    if len(kinds) < num_layers:
        raise InputError("config.json, layer_types", f"{len(kinds)} layers", str(num_layers), "Correct config.json.")
    return positive(raw, field, 0), tuple(layer for layer, kind in enumerate(kinds) if kind != "sliding_attention")


def layer_window(raw: Raw, num_layers: int) -> int | None:
    """Return the sliding window of all layers (`layer_windows`); raise NotReadHere if layers differ."""
    window, full_layers = layer_windows(raw, num_layers)
    if full_layers:
        raise NotReadHere("config.json, layer_types", ", ".join(sorted({*layer_types(raw)})), "layers of one kind")
    return window


def frequencies(llama: LlamaConfig, rope: RotarySettings | None = None) -> Tensor:
    """Return the frequencies [head_dim / 2] in float32; NaN for a kind of scaling that our layers do not compute.

    rope: settings in place of the layer's own.
    """
    rope = rope or RotarySettings.of(llama)
    if rope.kind not in ROPE_KINDS:
        return torch.full((llama.head_dim // 2,), math.nan)
    return rope_frequencies(dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling))


def to_adjacent(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the output rows [heads * D, ...] of q or k from rotary halves to adjacent pairs.

    rotated: dimensions of each head that are rotated, the first ones; None: all.
    """
    return _transposed(rows, heads, rotated, (2, -1))


def to_halves(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the output rows [heads * D, ...] of q or k from adjacent rotary pairs to halves."""
    return _transposed(rows, heads, rotated, (-1, 2))


def _transposed(rows: Tensor, heads: int, rotated: int | None, pairs: tuple[int, int]) -> Tensor:
    by_head = rows.unflatten(0, (heads, -1))
    turned, rest = by_head[:, :rotated], by_head[:, by_head.shape[1] if rotated is None else rotated :]
    return torch.cat([turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2), rest], 1).reshape(rows.shape)


def rope_fields(scaling: RopeScaling) -> Fields:
    """Return transformers' `rope_parameters` of a scaling, without the base."""
    fields: Fields = {"rope_type": scaling.kind}
    if scaling.partial_rotary_factor != 1:
        fields[PARTIAL] = scaling.partial_rotary_factor
    if scaling.kind != "default":
        fields["factor"] = float(scaling.factor)
    if scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        scale, usual = (rope_attention_scale(one) for one in (scaling, RopeScaling("yarn", scaling.factor)))
        if scale != usual:
            # SGLang reads the second, relative to the usual one; all others read the first.
            fields |= {"attention_factor": scale, "attn_factor": scale / usual}
    return fields


def llama_fields(llama: LlamaConfig, dtype: torch.dtype, rope: Mapping[str, object] = MappingProxyType({})) -> Fields:
    """Return the fields of transformers' LlamaConfig, in both spellings of rope and dtype.

    SafeAILab's code wants exactly `type` and a float `factor` in `rope_scaling`. rope: more rotary settings.
    """
    name = str(dtype).removeprefix("torch.")
    scaling, new = llama.rope_scaling, rope_fields(llama.rope_scaling)
    # transformers takes `rope_scaling` before `rope_parameters`.
    old = {"type": "linear", "factor": float(scaling.factor)} if scaling.kind == "linear" else new
    return {
        "model_type": "llama",
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_layers,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama.max_position,
        "rms_norm_eps": llama.rms_eps,
        "rope_theta": llama.rope_theta,
        "rope_scaling": None if scaling.kind == "default" else {**old, **rope},
        "rope_parameters": {**new, "rope_theta": llama.rope_theta, **rope},
        **({PARTIAL: scaling.partial_rotary_factor} if PARTIAL in new else {}),
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        **({} if llama.sliding_window is None else window_fields(llama)),
        "torch_dtype": name,
        "dtype": name,
    }


def window_fields(llama: LlamaConfig, full_layers: Sequence[int] = ()) -> Fields:
    """Return the fields by which vLLM and speculators read a sliding window, as transformers' configs have them."""
    without = range(llama.num_layers) if llama.sliding_window is None else full_layers
    return {
        "layer_types": [f"{'full' if i in without else 'sliding'}_attention" for i in range(llama.num_layers)],
        "use_sliding_window": llama.sliding_window is not None,
        "sliding_window": llama.sliding_window,
    }


def safeailab_rope(raw: Raw) -> RotarySettings:
    """Read rotary settings as SafeAILab/EAGLE does (cnets1.py, _init_rope).

    It knows `rope_theta` and `rope_scaling` only, and its base is 10000 under any scaling.
    """
    if scaling := config_object(raw, "rope_scaling"):
        factor = rope_number("factor", scaling.get("factor"), 1.0)
        return RotarySettings(BASE, RopeScaling(str(scaling.get("type")), factor))
    return RotarySettings(rope_number("rope_theta", raw.get("rope_theta"), BASE), RopeScaling())
