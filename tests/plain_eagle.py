"""An EAGLE-1 head in plain torch, as SafeAILab/EAGLE, vLLM and SGLang compute it: the oracle for ours.

Written from SafeAILab/EAGLE's eagle/model/cnets1.py and from llama.py and llama_eagle.py of vLLM 0.33.0 and SGLang
0.5.23: nothing of the product's layers or heads is in it but rotary frequencies, which other tests compare with those
of transformers. Slow, without a cache, one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.modules.layers import LlamaConfig, rope_frequencies


class PlainEagle:
    """weights: by the names in a file, without a prefix. llama: sizes and rotary settings of the layers."""

    def __init__(self, weights: Mapping[str, Tensor], llama: LlamaConfig):
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.llama = llama

    def hidden(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Return the states for the target's lm_head and, as the next feature, for the next step: [T, H], float64.

        embeds: [T, H], of token x_{t+1} in row t. features: [T, H], f_t in row t, the target's last hidden state after
        its final norm. Rows sit at positions 0 ... T-1.
        """
        x = self._linear("fc", torch.cat([embeds, features], dim=-1).double())
        for i in range(self.llama.num_layers):
            layer = f"layers.{i}."
            # Layer 0 reads the fused state without a norm.
            x = x + self._attention(layer, x if i == 0 else self._norm(layer + "input_layernorm", x))
            x = x + self._mlp(layer + "mlp.", self._norm(layer + "post_attention_layernorm", x))
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights.get(f"{name}.bias", torch.zeros(()))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps) * weight."""
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + self.llama.rms_eps).sqrt() * self.weights[f"{name}.weight"]

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        """Causal softmax attention of x [T, H]; query head n reads key head n // (num_heads / num_kv_heads)."""
        rows, heads, kv_heads, size = len(x), self.llama.num_heads, self.llama.num_kv_heads, self.llama.head_dim
        query, key, value = (self._linear(f"{layer}self_attn.{name}_proj", x).reshape(rows, -1, size) for name in "qkv")
        query, key = self._rotate(query), self._rotate(key)
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        mixed = []
        for head in range(heads):
            source = head * kv_heads // heads
            scores = query[:, head] @ key[:, source].T / math.sqrt(size)
            mixed.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value[:, source])
        return self._linear(layer + "self_attn.o_proj", torch.cat(mixed, dim=-1))

    def _rotate(self, x: Tensor) -> Tensor:
        """Half-split rotation of x [T, n, D]: element i pairs with element i + D/2 and turns by position * inv_freq[i].

        The angles are taken in float32, as in all three systems.
        """
        angles = torch.arange(len(x), dtype=torch.float32)[:, None, None] * rope_frequencies(self.llama)
        cos, sin = angles.cos().double(), angles.sin().double()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _mlp(self, mlp: str, x: Tensor) -> Tensor:
        """Compute down(SiLU(gate(x)) * up(x))."""
        gate = self._linear(mlp + "gate_proj", x)
        return self._linear(mlp + "down_proj", gate * torch.sigmoid(gate) * self._linear(mlp + "up_proj", x))
