"""What SafeAILab/EAGLE, vLLM and SGLang compute with an EAGLE-1 head, in plain torch: the oracle for ours.

Written from SafeAILab/EAGLE's eagle/model/cnets1.py and from llama.py and llama_eagle.py of vLLM 0.33.0 and SGLang
0.5.23: nothing of the product's layers or heads is in it but rotary frequencies, which other tests compare with those
of transformers. Slow, without a cache, one sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftsmith.modules.formats.base import Reading
from draftsmith.modules.layers import rope_frequencies


def hidden(reading: Reading, embeds: Tensor, features: Tensor) -> Tensor:
    """What goes to the target's lm_head and, as the next feature, to the next step: [T, H].

    embeds: [T, H], of token x_{t+1} in row t. features: [T, H], f_t in row t, the target's last hidden state after its
    final norm. Rows sit at positions 0 ... T-1. Computed in the inputs' dtype.
    """
    x = _linear(reading, "fc", torch.cat([embeds, features], dim=-1))
    for i in range(reading.settings["llama"].num_layers):
        layer = f"layers.{i}."
        # Layer 0 reads the fused state as it is.
        x = x + _attention(reading, layer, x if i == 0 else _norm(reading, layer + "input_layernorm", x))
        x = x + _mlp(reading, layer + "mlp.", _norm(reading, layer + "post_attention_layernorm", x))
    return x


def _linear(reading: Reading, name: str, x: Tensor) -> Tensor:
    """x W^T, plus the bias where the system holds one."""
    out = x @ reading.weights[f"{name}.weight"].to(x.dtype).T
    bias = reading.weights.get(f"{name}.bias")
    return out if bias is None else out + bias.to(x.dtype)


def _norm(reading: Reading, name: str, x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    scale = (x.pow(2).mean(dim=-1, keepdim=True) + reading.settings["llama"].rms_eps).sqrt()
    return x / scale * reading.weights[f"{name}.weight"].to(x.dtype)


def _attention(reading: Reading, layer: str, x: Tensor) -> Tensor:
    """Causal softmax attention of x [T, H]; query head n reads key head n // (num_heads / num_kv_heads)."""
    llama, length = reading.settings["llama"], x.shape[0]
    heads, kv_heads, size = llama.num_heads, llama.num_kv_heads, llama.head_dim
    query = _linear(reading, layer + "self_attn.q_proj", x).reshape(length, heads, size)
    key = _linear(reading, layer + "self_attn.k_proj", x).reshape(length, kv_heads, size)
    value = _linear(reading, layer + "self_attn.v_proj", x).reshape(length, kv_heads, size)
    query, key = (_rotate(part, rope_frequencies(llama)) for part in (query, key))
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(heads):
        source = head * kv_heads // heads
        scores = query[:, head] @ key[:, source].T / math.sqrt(size)
        mixed.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value[:, source])
    return _linear(reading, layer + "self_attn.o_proj", torch.cat(mixed, dim=-1))


def _rotate(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Half-split rotation of x [T, n, D]: element i pairs with element i + D/2 and turns by position * inv_freq[i].

    The angles are taken in float32, as in all three systems.
    """
    angles = torch.arange(x.shape[0], dtype=inv_freq.dtype)[:, None, None] * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(reading: Reading, mlp: str, x: Tensor) -> Tensor:
    """down(SiLU(gate(x)) * up(x))."""
    gate = _linear(reading, mlp + "gate_proj", x)
    return _linear(reading, mlp + "down_proj", gate * torch.sigmoid(gate) * _linear(reading, mlp + "up_proj", x))
