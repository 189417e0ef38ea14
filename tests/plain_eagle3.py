"""What SafeAILab/EAGLE, vLLM, SGLang and speculators compute with an EAGLE-3 head, in plain torch: the oracle for ours.

Written from SafeAILab/EAGLE's eagle/model/cnets.py and from vLLM 0.33.0's and speculators 0.9.0's switches, on a file's
own tensors and names. Slow, without a cache: a draft reads everything again at every token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.llama import flat
from draftsmith.modules.layers import LlamaConfig, rope_frequencies


class PlainEagle3:
    """llama: sizes and rotary settings of its layer."""

    def __init__(self, package: Package, llama: LlamaConfig):
        self.raw: Mapping[str, Any] = flat(package.config)
        self.tensors = {
            name.replace("midlayer.", "layers.0."): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in package.tensors.items()
        }
        self.llama = llama

    def draft(self, embedding: Tensor, ids: Tensor, states: Tensor, steps: int) -> Tensor:
        """Logits [steps, V] of a greedy draft behind the target's states [T, 3H] of tokens 0 ... T-1, whose next ones
        are ids [T]."""
        size = self.llama.hidden_size
        if self.raw.get("fc_norm"):
            parts = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(states.split(size, -1))]
            states = torch.cat(parts, -1)
        if self.raw.get("norm_before_fc"):
            states = self._norm("input_norm", states)
        fed, found = states @ self.tensors["fc.weight"].T, []
        for _ in range(steps):
            out = self._layer(embedding[ids], fed)[-1:]
            normed = self._norm("norm", out)
            drafted = normed @ self.tensors["lm_head.weight"].T
            whole = torch.full((1, self.llama.vocab_size), -math.inf, dtype=drafted.dtype)
            for i in range(drafted.shape[1]):
                offset = int(self.tensors["d2t"][i]) if "d2t" in self.tensors else 0
                whole[0, i + offset] = drafted[0, i]
            found.append(whole)
            ids = torch.cat([ids, whole.argmax(-1)])
            fed = torch.cat([fed, normed if self.raw.get("norm_output") else out])
        return torch.cat(found)

    def _layer(self, embeds: Tensor, fed: Tensor) -> Tensor:
        normed = self._norm("layers.0.hidden_norm", fed)
        pair = torch.cat([self._norm("layers.0.input_layernorm", embeds), normed], -1)
        x = (normed if self.raw.get("norm_before_residual") else fed) + self._attention(pair)
        inner = self._norm("layers.0.post_attention_layernorm", x)
        gate, up, down = (self.tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = inner @ gate.T
        return x + (gated * torch.sigmoid(gated) * (inner @ up.T)) @ down.T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.llama.rms_eps).sqrt() * self.tensors[f"{name}.weight"]

    def _attention(self, x: Tensor) -> Tensor:
        llama, rows = self.llama, len(x)
        query, key, value = (x @ self.tensors[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
        query, key = (self._rotate(part.view(rows, -1, llama.head_dim)) for part in (query, key))
        value = value.view(rows, -1, llama.head_dim)
        later, mixed = torch.ones(rows, rows, dtype=torch.bool).triu(1), []
        for head in range(llama.num_heads):
            source = head * llama.num_kv_heads // llama.num_heads
            scores = query[:, head] @ key[:, source].T / math.sqrt(llama.head_dim)
            mixed.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value[:, source])
        return torch.cat(mixed, -1) @ self.tensors["layers.0.self_attn.o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x), dtype=torch.float32)[:, None, None] * rope_frequencies(self.llama)
        cos, sin = angles.cos().double(), angles.sin().double()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
