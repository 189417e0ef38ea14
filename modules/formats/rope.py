"""Rotary settings of a foreign head, where a system reads them in its own way or our layers do not compute them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.layers import (
    BASE,
    ROPE_KINDS,
    LlamaConfig,
    RopeScaling,
    RotarySettings,
    config_object,
    rope_frequencies,
    rope_number,
)


def safeailab_rope(raw: Mapping[str, Any]) -> RotarySettings:
    """Read rotary settings as SafeAILab/EAGLE does (cnets1.py, _init_rope).

    It knows `rope_theta` and `rope_scaling` only, and its base is 10000 under any scaling.
    """
    if scaling := config_object(raw, "rope_scaling"):
        factor = rope_number("factor", scaling.get("factor"), 1.0)
        return RotarySettings(BASE, RopeScaling(str(scaling.get("type")), factor))
    return RotarySettings(rope_number("rope_theta", raw.get("rope_theta"), BASE), RopeScaling())


def frequencies(llama: LlamaConfig, rope: RotarySettings | None = None) -> Tensor:
    """Return the frequencies [head_dim / 2] in float32; NaN for a kind of scaling that our layers do not compute.

    rope: settings in place of the layer's own.
    """
    rope = rope or RotarySettings.of(llama)
    if rope.kind not in ROPE_KINDS:
        return torch.full((llama.head_dim // 2,), math.nan)
    return rope_frequencies(dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling))
