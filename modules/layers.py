"""The Llama decoder layer, shared by targets, draft models, draft heads and training.

Parameter names are those of transformers' Llama, Mistral, Qwen2 and Qwen3, so state dicts need no map.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.attention import attend_text
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.rotary import add_rope_table, rotate


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean is taken in float32 or wider, as in transformers."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attend(Protocol):
    """Attention as the caller of a layer brings it: over a text, a draft, a block or a cache."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return values [.., heads, D] for query [.., heads, D], key and value [.., kv_heads, D], token by token.

        sinks: [heads], the score of an entry without a value that every token sees (MiMo-V2, gpt-oss).
        """


class Layer(Protocol):
    """A decoder layer. It works on single tokens; only `attend` knows how these are laid out."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the output [.., H] for x [.., H'], at positions of these cos and sin, [.., 1, rotary_dim]."""

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and value [.., kv_heads, D] that the layer calls its attention with."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; biases and q/k norms as the config says."""

    def __init__(self, config: LlamaConfig, in_size: int | None = None):
        """in_size: width of the input; None: the layer's width."""
        super().__init__()
        in_size = in_size or config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(in_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(in_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(in_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_eps)
        self.qk_norm = config.qk_norm

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated k and v [.., kv_heads, D] of x [.., H']; cos and sin [.., 1, rotary_dim]."""
        key, value = (proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        if self.qk_norm:
            key = self.k_norm(key)
        return rotate(key, cos, sin), value

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the output [.., H] for x [.., H']; the others as of `Layer`."""
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        if self.qk_norm:
            query = self.q_norm(query)
        query, (key, value) = rotate(query, cos, sin), self.keys_values(x, cos, sin)
        return self.o_proj(attend(query, key, value).flatten(-2))


class MLP(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals (`Layer`). `input_norm=False` is EAGLE-1's layer 0, which has none."""

    def __init__(self, config: LlamaConfig, input_norm: bool = True, in_size: int | None = None):
        """in_size: width of attention's input; None: the layer's width."""
        super().__init__()
        self.self_attn = Attention(config, in_size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [.., H'] and the residual [.., H] for the layer's input."""
        return self.input_layernorm(x), x

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self.enter(x)[0], cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed, x = self.enter(x)
        x = x + self.self_attn(normed, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


# An embedding [.., H], normed, and a state [.., H].
Pair = tuple[Tensor, Tensor]


class PairLayer(DecoderLayer):
    """EAGLE-3's decoder layer, of an embedding and a state side by side, [.., 2 H], or of a `Pair`: its attention reads
    [norm(embedding); norm(state)], and its residual is the state.

    normed_residual: the residual is the normed state.
    """

    def __init__(self, config: LlamaConfig, normed_residual: bool = False):
        super().__init__(config, in_size=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.normed_residual = normed_residual

    def enter(self, x: Tensor | Pair) -> tuple[Tensor, Tensor]:
        if isinstance(x, tuple):
            embeds, states = x
        else:
            embeds, states = x.chunk(2, -1)
            embeds = self.input_layernorm(embeds)
        normed = self.hidden_norm(states)
        return torch.cat([embeds, normed], -1), normed if self.normed_residual else states


class LlamaModel(nn.Module):
    """A whole language model, uncached: training and teacher forcing.

    Right padding needs no mask: attention is causal.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        add_rope_table(self, config, config.max_position)

    def features(self, input_ids: Tensor) -> Tensor:
        """Compute hidden states after the final norm [B, T, H] of input_ids [B, T], positions from 0."""
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids)
        cos, sin = (table[:length, None].to(x.dtype) for table in (self.cos, self.sin))  # [T, 1, D]
        attend = partial(attend_text, window=self.config.sliding_window)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute logits [B, T, V]."""
        return self.lm_head(self.features(input_ids))
