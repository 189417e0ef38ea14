"""Rotary settings of a foreign `config.json`, as each system reads them.

The old spelling is `rope_theta` and `rope_scaling`, the new one (transformers 5) `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.layers import ROPE_KINDS as KNOWN
from draftsmith.modules.layers import LlamaConfig, RopeScaling, rope_frequencies
from draftsmith.modules.types import InputError

BASE = 10000.0  # the default of all systems
PARTIAL = "partial_rotary_factor"
# Keys that a kind of scaling needs (transformers' modeling_rope_utils.py).
REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True)
class RotarySettings:
    """Rotary base and scaling. The kind may be one that our layers do not compute, also PARTIAL and its value."""

    theta: float
    scaling: RopeScaling

    @staticmethod
    def of(llama: LlamaConfig) -> RotarySettings:
        return RotarySettings(llama.rope_theta, llama.rope_scaling)

    @property
    def kind(self) -> str:
        return self.scaling.kind

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f", {self.kind} scaling by {self.scaling.factor:g}"
        return f"base {self.theta:g}{scaled}"


def transformers_rope(raw: Mapping[str, Any]) -> RotarySettings:
    """Read rotary settings as transformers 5, vLLM 0.33.0 and SGLang 0.5.23 do.

    `rope_scaling` counts before `rope_parameters`, a base inside them before the one outside (modeling_rope_utils.py).
    """
    rope = _preferred(raw)
    inside, outside = rope.get("rope_theta"), raw.get("rope_theta")
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    partial = _number(PARTIAL, rope.get(PARTIAL) or raw.get(PARTIAL), 1.0)
    scaling = RopeScaling(
        kind=_kind(rope) if partial == 1.0 else f"{PARTIAL} {partial:g}",
        factor=_number("factor", rope.get("factor"), 1.0),
        low_freq_factor=_number("low_freq_factor", rope.get("low_freq_factor"), 1.0),
        high_freq_factor=_number("high_freq_factor", rope.get("high_freq_factor"), 4.0),
        original_max_position=original or raw.get("max_position_embeddings", 2048),
    )
    return RotarySettings(_number("rope_theta", outside if inside is None else inside, BASE), scaling)


def safeailab_rope(raw: Mapping[str, Any]) -> RotarySettings:
    """Read rotary settings as SafeAILab/EAGLE does (cnets1.py, _init_rope).

    It knows the old spelling only, and its base is 10000 under any scaling.
    """
    if scaling := _block(raw, "rope_scaling"):
        return RotarySettings(
            BASE, RopeScaling(str(scaling.get("type")), _number("factor", scaling.get("factor"), 1.0))
        )
    return RotarySettings(_number("rope_theta", raw.get("rope_theta"), BASE), RopeScaling())


def frequencies(llama: LlamaConfig, rope: RotarySettings | None = None) -> Tensor:
    """Return the frequencies [head_dim / 2] in float32; NaN for a kind of scaling that our layers do not compute.

    rope: settings in place of the layer's own.
    """
    rope = rope or RotarySettings.of(llama)
    if rope.kind not in KNOWN:
        return torch.full((llama.head_dim // 2,), math.nan)
    return rope_frequencies(dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling))


def missing_keys(raw: Mapping[str, Any]) -> list[str]:
    """Return the keys that the scaling needs and `config.json` lacks."""
    rope = _preferred(raw)
    return [key for key in REQUIRED.get(_kind(rope), ()) if rope.get(key) is None]


def _number(name: str, value: Any, default: float) -> float:
    """Return a number of the rotary settings, or the default if there is none."""
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"config.json, {name}", repr(value)[:80], "a number", "Correct config.json.")
    return float(value)


def _block(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = raw.get(key) or {}
    if not isinstance(block, Mapping):
        raise InputError(key, repr(block), "an object or null", "Correct config.json.")
    return block


def _preferred(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return _block(raw, "rope_scaling") or _block(raw, "rope_parameters")


def _kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str):
        raise InputError("config.json, rope_type", repr(kind)[:80], "a name", "Correct config.json.")
    return kind
