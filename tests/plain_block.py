"""Block drafters in plain torch, as DeepSpec's, z-lab's and vLLM's code computes them: the oracle for ours.

Written from deepseek-ai/DeepSpec's modeling/dspark and vLLM's qwen3_dflash.py and qwen3_dspark.py, on a file's own
tensors and names. Slow, without a cache, one block at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.layers import rope_frequencies


class PlainBlock:
    def __init__(self, tensors: Mapping[str, Tensor], config: BlockConfig, embedding: Tensor, output: Tensor):
        self.tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        self.config, self.embedding, self.output = config, embedding.double(), output.double()

    def slots(self, anchor: int, states: Tensor, count: int) -> Tensor:
        """States [count, H] of a block's slots behind the target's states [a, n H] of what precedes the anchor."""
        size = self.config.hidden_size
        context = self._norm("hidden_norm", states.double() @ self.tensors["fc.weight"].T)
        x = self.embedding[[anchor, *[self.config.mask_token] * (count - 1)]]
        for i in range(self.config.llama.num_layers):
            x = self._layer(f"layers.{i}.", x, context)
        assert x.shape == (count, size)
        return self._norm("norm", x)

    def draft(self, anchor: int, states: Tensor, drafts: int) -> tuple[Tensor, Tensor, list[int]]:
        """Logits [drafts, V], the confidence head's log-odds [drafts] and the tokens of a greedy draft."""
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
        """Logits [V] and confidence of a slot's token behind this one, and the memory of an rnn."""
        logits, inputs, kind = self.output @ h, h, self.config.markov_type
        if self.config.markov_rank:
            e = self.tensors["markov_head.markov_w1.weight"][previous]
            inputs, z = torch.cat([h, e]), e
            if kind == "gated":
                z = torch.sigmoid(self._linear("markov_head.gate_proj", torch.cat([h, e]))) * e
            elif kind == "rnn":
                g, c, o = self._linear("markov_head.joint_proj", torch.cat([memory, e, h])).chunk(3)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                z = torch.tanh(o)
            logits = logits + self.tensors["markov_head.markov_w2.weight"] @ z
        odds = self._linear("confidence_head.proj", inputs)[0] if self.config.confidence else None
        return logits, odds, memory

    def _layer(self, name: str, x: Tensor, context: Tensor) -> Tensor:
        llama, before = self.config.llama, len(context)
        normed = self._norm(name + "input_layernorm", x)
        both = torch.cat([context, normed])
        heads, kv_heads, dim = llama.num_heads, llama.num_kv_heads, llama.head_dim
        query = self._linear(name + "self_attn.q_proj", normed).view(-1, heads, dim)
        key = self._linear(name + "self_attn.k_proj", both).view(-1, kv_heads, dim)
        value = self._linear(name + "self_attn.v_proj", both).view(-1, kv_heads, dim)
        query = self._rotate(self._norm(name + "self_attn.q_norm", query), before)
        key = self._rotate(self._norm(name + "self_attn.k_norm", key), 0)
        mixed = []
        for head in range(heads):
            shared = head * kv_heads // heads
            weights = (query[:, head] @ key[:, shared].T / dim**0.5).softmax(-1)
            mixed.append(weights @ value[:, shared])
        x = x + self._linear(name + "self_attn.o_proj", torch.cat(mixed, -1))
        inner = self._norm(name + "post_attention_layernorm", x)
        gate, up = (self._linear(f"{name}mlp.{part}_proj", inner) for part in ("gate", "up"))
        return x + self._linear(name + "mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + len(x)).double()
        angles = torch.outer(positions, rope_frequencies(self.config.llama).double())
        cos, sin = (part[:, None].repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.config.llama.rms_eps).sqrt() * self.tensors[name + ".weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        product = x @ self.tensors[name + ".weight"].T
        return product + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else product
