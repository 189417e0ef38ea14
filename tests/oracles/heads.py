"""Draft heads as other systems compute them: plain torch in float64, without a cache, on a file's tensors and names.

Nothing of the product's layers or heads is in here but rotary frequencies, which other tests compare with those of
transformers. Slow: every draft reads everything again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.llama import flat
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.rotary import rope_attention_scale, rope_frequencies


class Plain:
    """Parts of a Llama layer. llama: sizes and rotary settings. angles: the type that rotary angles are taken in."""

    def __init__(self, tensors: Mapping[str, Tensor], llama: LlamaConfig, angles: torch.dtype = torch.float32):
        self.llama, self.angles = llama, angles
        self.tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(()))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps) * weight."""
        return x / (x.pow(2).mean(-1, keepdim=True) + self.llama.rms_eps).sqrt() * self.tensors[f"{name}.weight"]

    def rotate(self, x: Tensor, first: int = 0) -> Tensor:
        """Rotate x [T, n, D] by halves of what rotates: element i pairs with element i + R/2 and turns by position *
        inv_freq[i]."""
        positions = torch.arange(first, first + len(x), dtype=self.angles)
        angles = positions[:, None, None] * rope_frequencies(self.llama).to(self.angles)
        scale, half = rope_attention_scale(self.llama.rope_scaling), angles.shape[-1]
        cos, sin = angles.cos().double() * scale, angles.sin().double() * scale
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, layer: str, x: Tensor, context: Tensor | None = None, full: bool = False) -> Tensor:
        """Attend from x [T, H], also to a context [C, H]: causally, or if `full` to all of x. Query head n reads key
        head n // (num_heads / num_kv_heads)."""
        llama, before = self.llama, 0 if context is None else len(context)
        read = x if context is None else torch.cat([context, x])
        query, key, value = (
            self.linear(f"{layer}self_attn.{name}_proj", part).reshape(len(part), -1, llama.head_dim)
            for name, part in zip("qkv", (x, read, read), strict=True)
        )
        if f"{layer}self_attn.q_norm.weight" in self.tensors:
            query, key = (self.norm(f"{layer}self_attn.{n}_norm", part) for n, part in (("q", query), ("k", key)))
        query, key = self.rotate(query, before), self.rotate(key)
        place, mixed = torch.arange(len(read)), []
        at, window = before + torch.arange(len(x))[:, None], self.window(layer)
        hidden = (place > at) & (not full)
        if window is not None:
            hidden = hidden | (place <= at - window)
        for head in range(llama.num_heads):
            shared = head * llama.num_kv_heads // llama.num_heads
            scores = query[:, head] @ key[:, shared].T / math.sqrt(llama.head_dim)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, shared])
        return self.linear(f"{layer}self_attn.o_proj", torch.cat(mixed, -1))

    def window(self, layer: str) -> int | None:
        return self.llama.sliding_window

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        """Compute down(SiLU(gate(x)) * up(x))."""
        gate = self.linear(f"{layer}mlp.gate_proj", x)
        return self.linear(f"{layer}mlp.down_proj", gate * torch.sigmoid(gate) * self.linear(f"{layer}mlp.up_proj", x))


class PlainEagle(Plain):
    """An EAGLE-1 head, from SafeAILab/EAGLE's cnets1.py and llama_eagle.py of vLLM 0.33.0 and SGLang 0.5.23."""

    def hidden(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Return the states for the target's lm_head and, as the next feature, for the next step: [T, H].

        embeds: [T, H], of token x_{t+1} in row t. features: [T, H], f_t in row t, the target's last hidden state after
        its final norm. Rows sit at positions 0 ... T-1.
        """
        x = self.linear("fc", torch.cat([embeds, features], dim=-1).double())
        for i in range(self.llama.num_layers):
            layer = f"layers.{i}."
            # Layer 0 reads the fused state without a norm.
            x = x + self.attention(layer, x if i == 0 else self.norm(layer + "input_layernorm", x))
            x = x + self.mlp(layer, self.norm(layer + "post_attention_layernorm", x))
        return x


class PlainEagle3(Plain):
    """An EAGLE-3 head, from SafeAILab/EAGLE's cnets.py and the switches of vLLM 0.33.0 and speculators 0.9.0."""

    def __init__(self, package: Package, llama: LlamaConfig):
        super().__init__({name.replace("midlayer.", "layers.0."): x for name, x in package.tensors.items()}, llama)
        self.raw: Mapping[str, Any] = flat(package.config)

    def draft(self, embedding: Tensor, ids: Tensor, states: Tensor, steps: int) -> Tensor:
        """Return logits [steps, V] of a greedy draft behind the target's states [T, 3H] of tokens 0 ... T-1, whose next
        ones are ids [T]."""
        size, embedding = self.llama.hidden_size, self.tensors.get("embed_tokens.weight", embedding)
        if self.raw.get("fc_norm"):
            parts = [self.norm(f"fc_norm.{i}", part) for i, part in enumerate(states.split(size, -1))]
            states = torch.cat(parts, -1)
        if self.raw.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        fed, found = self.linear("fc", states), []
        for _ in range(steps):
            out = self.layers(embedding[ids], fed)[-1:]
            normed = self.norm("norm", out)
            drafted = self.linear("lm_head", normed)
            whole = torch.full((1, self.llama.vocab_size), -math.inf, dtype=drafted.dtype)
            for i in range(drafted.shape[1]):
                offset = int(self.tensors["d2t"][i]) if "d2t" in self.tensors else 0
                whole[0, i + offset] = drafted[0, i]
            found.append(whole)
            ids = torch.cat([ids, whole.argmax(-1)])
            fed = torch.cat([fed, normed if self.raw.get("norm_output") else out])
        return torch.cat(found)

    def layers(self, embeds: Tensor, fed: Tensor) -> Tensor:
        """Return the last layer's output [T, H] for pairs of embeddings and fed states [T, H]."""
        normed = self.norm("layers.0.hidden_norm", fed)
        pair = torch.cat([self.norm("layers.0.input_layernorm", embeds), normed], -1)
        x = (normed if self.raw.get("norm_before_residual") else fed) + self.attention("layers.0.", pair)
        x = x + self.mlp("layers.0.", self.norm("layers.0.post_attention_layernorm", x))
        for i in range(1, self.raw["num_hidden_layers"]):
            x = x + self.attention(f"layers.{i}.", self.norm(f"layers.{i}.input_layernorm", x))
            x = x + self.mlp(f"layers.{i}.", self.norm(f"layers.{i}.post_attention_layernorm", x))
        return x


class PlainBlock(Plain):
    """A block drafter, one block at a time, from DeepSpec's modeling/dspark and vLLM's qwen3_dflash.py,
    qwen3_dflash2.py and qwen3_dspark.py."""

    def __init__(self, tensors: Mapping[str, Tensor], config: BlockConfig, embedding: Tensor, output: Tensor):
        super().__init__(tensors, config.llama, torch.float64)
        self.config, self.embedding = config, embedding.double()
        self.output = self.tensors.get("lm_head.weight", output.double())
        self.ids = tensors.get("d2t", torch.arange(len(output)))  # of the tokens that it can draft

    def slots(self, anchor: int, states: Tensor, count: int) -> Tensor:
        """Return states [count, H] of a block's slots behind the target's states [a, n H] of what precedes the
        anchor."""
        context = self.norm("hidden_norm", self.linear("fc", states.double()))
        x = self.embedding[[anchor, *[self.config.mask_token] * (count - 1)]]
        for i in range(self.llama.num_layers):
            layer = f"layers.{i}."
            y, kernels = self.convolved(layer + "attention_conv", self.norm(layer + "input_layernorm", x))
            # Where a config does not say, windowed layers are causal (vLLM qwen3_dflash.py).
            full = self.window(layer) is None if self.config.causal is None else not self.config.causal
            attended = self.attention(layer, y, context, full)
            x = x + self.convolved(layer + "attention_conv", attended, kernels)[0]
            y, kernels = self.convolved(layer + "mlp_conv", self.norm(layer + "post_attention_layernorm", x))
            x = x + self.convolved(layer + "mlp_conv", self.mlp(layer, y), kernels)[0]
        assert x.shape == (count, self.config.hidden_size)
        return self.norm("norm", x)

    def window(self, layer: str) -> int | None:
        return None if int(layer.split(".")[1]) in self.config.full_layers else self.llama.sliding_window

    def convolved(self, name: str, x: Tensor, kernels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve x [S, H] slot by slot: before a sublayer, or, with its kernels, behind it; return the kernels."""
        if not self.config.conv_kernel:
            return x, x
        which, taps = int(kernels is not None), self.config.conv_kernel
        if kernels is None:
            kernels = self.linear(name + ".kernel_projection", x).view(len(x), 2, taps, -1)
        base, y = self.tensors[name + ".base_kernel"][which], torch.zeros_like(x)
        channel = torch.arange(x.shape[1])
        for slot in range(len(x)):
            for tap in range(min(taps, slot + 1)):
                delta = kernels[slot, which, tap, channel // self.config.conv_group]
                y[slot] += (base[tap] + delta) * x[slot - tap]
        return y, kernels

    def edges(self, h: Tensor, previous: int) -> Tensor:
        """Return what a selector adds to the logits [V] of a slot of state h behind a token."""
        tables = [self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")]
        return tables[1] @ (tables[0][previous] * self.linear("candidate_selector.hidden_projection", h))

    def draft(self, anchor: int, states: Tensor, drafts: int) -> tuple[Tensor, Tensor, list[int]]:
        """Return logits [drafts, V], the confidence head's log-odds [drafts] and the tokens of a greedy draft."""
        first = int(self.config.layout == "fill-in")
        memory, previous = torch.zeros(self.config.markov_rank).double(), anchor
        logits, odds, tokens = [], [], []
        for h in self.slots(anchor, states, drafts + first)[first:]:
            own, sure, memory = self.token(h, previous, memory)
            logits.append(own)
            odds += [] if sure is None else [sure]
            previous = int(own.argmax())
            tokens.append(previous)
        return torch.stack(logits), torch.stack(odds) if odds else torch.zeros(0), tokens

    def token(self, h: Tensor, previous: int, memory: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return logits [V] and confidence of a slot's token behind this one, and the memory of an rnn."""
        drafted, inputs, kind = self.output @ h, h, self.config.markov_type
        if self.config.markov_rank:
            e = self.tensors["markov_head.markov_w1.weight"][previous]
            inputs, z = torch.cat([h, e]), e
            if kind == "gated":
                z = torch.sigmoid(self.linear("markov_head.gate_proj", torch.cat([h, e]))) * e
            elif kind == "rnn":
                g, c, o = self.linear("markov_head.joint_proj", torch.cat([memory, e, h])).chunk(3)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                z = torch.tanh(o)
            drafted = drafted + self.tensors["markov_head.markov_w2.weight"] @ z
        logits = torch.full((len(self.embedding),), -torch.inf).double().index_copy(0, self.ids, drafted)
        if self.config.selector_rank:
            worst = sorted(logits.tolist())[-self.config.selector_top_k]
            logits = torch.where(logits >= worst, logits + self.edges(h, previous), -torch.inf)
        odds = self.linear("confidence_head.proj", inputs)[0] if self.config.confidence else None
        return logits, odds, memory
