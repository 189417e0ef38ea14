"""Rotary positions: frequencies of every scaling, tables of cos and sin, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from draftsmith.modules.llama_config import ROPE_KINDS, LlamaConfig, RopeScaling
from draftsmith.modules.types import InputError


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Compute inverse frequencies [rotary_dim / 2] in float32, scaled (Llama 3.1 report, section 3.2; YaRN)."""
    size, scaling = config.rotary_dim, config.rope_scaling
    inv_freq = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    if scaling.kind == "default":
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        # Infinite where both factors are equal (Llama 4 Scout): then nothing lies between, and no blend is taken.
        blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
        blended = torch.where(wavelength < high, inv_freq, blended)
        return torch.where(wavelength > low, inv_freq / scaling.factor, blended)
    if scaling.kind == "yarn":
        # Pairs that turn more often than beta_fast in the trained context stay, those below beta_slow are stretched.
        ends = [
            size * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(size // 2).float() - low) / ((high - low) or 0.001)
        stays = 1 - ramp.clamp(0, 1)
        return inv_freq / scaling.factor * (1 - stays) + inv_freq * stays
    raise InputError("rope_type", scaling.kind, " or ".join(ROPE_KINDS), "Such layers are not supported.")


def rope_attention_scale(scaling: RopeScaling) -> float:
    """Return the factor on cos and sin, by which YaRN sharpens attention (transformers' modeling_rope_utils.py)."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


def rope_table(config: LlamaConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin, each [num_positions, rotary_dim], in float32."""
    angles = torch.outer(torch.arange(num_positions).float(), rope_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    scale = rope_attention_scale(config.rope_scaling)
    return angles.cos() * scale, angles.sin() * scale


def add_rope_table(module: nn.Module, config: LlamaConfig, num_positions: int) -> None:
    """Add `rope_table` to a module, as buffers `cos` and `sin` that no file holds."""
    for name, table in zip(("cos", "sin"), rope_table(config, num_positions), strict=True):
        module.register_buffer(name, table, persistent=False)


def rope_at(cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [.., 1, rotary_dim] of a table at positions [..]; beyond its end, where no loss has a token,
    those of its last one."""
    at = positions.clamp_max(len(cos) - 1)
    return cos[at][..., None, :].to(dtype), sin[at][..., None, :].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [..., T, D]; cos and sin broadcast as [..., T, rotary_dim]."""
    if (size := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], -1)
    half = size // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + rotated * sin
