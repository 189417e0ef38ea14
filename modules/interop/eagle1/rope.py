"""Rotary settings of a foreign `config.json`: as each system reads them, and whether their two spellings agree.

The old spelling is `rope_theta` and `rope_scaling`, the new one (transformers 5) `rope_parameters`. Frequencies are
computed here a second time, from the systems' formulas, because a check compares them with those of our layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.types import InputError

BASE = 10000.0  # where nothing is said
# What a kind of scaling cannot do without (transformers' modeling_rope_utils.py).
REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True)
class Rope:
    """theta: base. The others as in transformers' `rope_parameters`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f", {self.kind} scaling by {self.factor:g}"
        return f"base {self.theta:g}{scaled}"


def transformers_rope(raw: Mapping[str, Any]) -> Rope:
    """Rotary settings as transformers 5 folds both spellings into one, which vLLM 0.33.0 and SGLang 0.5.23 read:
    `rope_scaling` before `rope_parameters`, a base inside them before the one outside (modeling_rope_utils.py)."""
    rope = _block(raw, "rope_scaling") or _block(raw, "rope_parameters")
    inside = rope.get("rope_theta")
    outside = raw.get("rope_theta")
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return Rope(
        theta=float(inside if inside is not None else BASE if outside is None else outside),
        kind=rope.get("rope_type") or rope.get("type") or "default",
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_max_position=original or raw.get("max_position_embeddings", 2048),
        partial=float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0),
    )


def safeailab_rope(raw: Mapping[str, Any]) -> Rope:
    """Rotary settings as SafeAILab/EAGLE reads them (cnets1.py, _init_rope): the old spelling only, and base 10000
    under any scaling."""
    scaling = _block(raw, "rope_scaling")
    if scaling:
        return Rope(BASE, str(scaling.get("type")), float(scaling.get("factor") or 1.0))
    base = raw.get("rope_theta")
    return Rope(BASE if base is None else float(base))


def missing_keys(raw: Mapping[str, Any]) -> list[str]:
    """What the scaling needs and config.json does not say, in the spelling that transformers prefers."""
    rope = _block(raw, "rope_scaling") or _block(raw, "rope_parameters")
    return [key for key in REQUIRED.get(transformers_rope(raw).kind, ()) if rope.get(key) is None]


def conflict(raw: Mapping[str, Any]) -> str | None:
    """How the two spellings contradict each other, or None. What only one of them says is no contradiction."""
    old, new = _block(raw, "rope_scaling"), _block(raw, "rope_parameters")
    bases = {
        "rope_theta": raw.get("rope_theta"),
        "rope_scaling.rope_theta": old.get("rope_theta"),
        "rope_parameters.rope_theta": new.get("rope_theta"),
    }
    said = {name: float(base) for name, base in bases.items() if base is not None}
    if len(set(said.values())) > 1:
        return " but ".join(f"{name} {base:g}" for name, base in said.items())
    if new and "rope_scaling" in raw and _scaling(old) != _scaling(new):
        return f"rope_scaling {dict(old) or None} but rope_parameters {dict(new)}"
    return None


def _block(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = raw.get(key) or {}
    if not isinstance(block, Mapping):
        raise InputError(key, repr(block), "an object or null", "Correct config.json.")
    return block


def _scaling(rope: Mapping[str, Any]) -> tuple[Any, ...]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return (kind,)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return (kind, *(None if rope.get(key) is None else float(rope[key]) for key in keys))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2], float32; NaN where the kind is none of default, linear and llama3 (vLLM 0.33.0,
    layers/rotary_embedding/: base.py, linear_scaling_rope.py, llama3_rope.py)."""
    plain = [1.0 / rope.theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.partial != 1.0 or rope.kind not in ("default", "linear", "llama3"):
        return torch.full((head_dim // 2,), math.nan)
    if rope.kind == "linear":
        return torch.tensor([frequency / rope.factor for frequency in plain], dtype=torch.float32)
    if rope.kind == "llama3":
        return torch.tensor([_llama3(rope, frequency) for frequency in plain], dtype=torch.float32)
    return torch.tensor(plain, dtype=torch.float32)


def _llama3(rope: Rope, frequency: float) -> float:
    """Short waves stay, long ones are stretched by `factor`, those between are blended."""
    turns = rope.original_max_position * frequency / (2 * math.pi)  # of this wave within the original context
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    share = (turns - rope.low_freq_factor) / span if span else 0.0
    return share * frequency + (1 - share) * frequency / rope.factor
