"""Network of a block drafter: DFlash, and DSpark's Markov and confidence heads (deepseek-ai/DeepSpec, modeling/dspark).

One pass drafts a whole block: a few decoder layers read the last token, the anchor, and mask tokens behind it. Their
queries come from the block, their keys and values from the block and from the target's states of everything before the
anchor:

    context t < a      c_t = norm(fc([states of the target's layers at t])), the same in every layer
    block of anchor a  slots a, a+1, ..: the embeddings of [x_a, MASK, MASK, ..], which all see each other
    logits of a slot   lm_head(norm(h)), of the target, plus W2 z(previous token) of the Markov head

Modules are named as in DeepSpec's files, which vLLM, SGLang and llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.settings import Layout, MarkovType
from draftsmith.modules.engine.cache import takes_shared
from draftsmith.modules.layers import (
    MOST_LAYERS,
    MOST_SIZE,
    PLAIN,
    CaptureConfig,
    DecoderLayer,
    LlamaConfig,
    RMSNorm,
    add_rope_table,
    layers_of,
    rotate,
)
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import check_config, check_range

# Published blocks have 5 to 16 slots.
MOST_SLOTS = 256
# Slots that are attended to together while training: a larger group computes more that its mask hides.
GROUP_SLOTS = 1024


@dataclass(frozen=True)
class BlockConfig(CaptureConfig):
    """Config of a block drafter. llama: its layers, with q/k norms, as in Qwen3.

    block_size: slots of the blocks that it was trained on, the anchor's among them. mask_token: fills the others.
    layout: `anchor-first`, slot s predicts token s + 1 behind the anchor (DSpark); `fill-in`, slot s predicts token s,
        and the anchor's nothing (DFlash).
    markov_rank: width of the Markov head, 0 without one. markov_type: its inputs (`MarkovHead`).
    confidence: it has a confidence head.
    """

    block_size: int
    mask_token: int
    layout: Layout = "anchor-first"
    markov_rank: int = 0
    markov_type: MarkovType = "vanilla"
    confidence: bool = False
    windowed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(
            self,
            block_size=(1 + self.first_slot, MOST_SLOTS),
            mask_token=(0, self.vocab_size - 1),
            markov_rank=(0, MOST_SIZE),
        )
        check_range("num_layers", self.llama.num_layers, 1, MOST_LAYERS)

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token behind the anchor."""
        return int(self.layout == "fill-in")

    @property
    def drafts(self) -> int:
        """Most tokens of a draft."""
        return self.block_size - self.first_slot

    def slots(self, drafts: int) -> int:
        """Return the slots of a block that drafts so many tokens."""
        return drafts + self.first_slot


class MarkovHead(nn.Module):
    """Adds W2 z to a token's logits, where z depends on the token before it, e = W1[previous] (DSpark, section 3).

    vanilla: z = e. gated: z = sigmoid(gate([h; e])) * e, h the slot's state. rnn: [g, c, o] = joint([s; e; h]), the
    memory s becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), and z = tanh(o).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, rank, self.markov_type = config.hidden_size, config.markov_rank, config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.markov_type == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def step(self, hidden: Tensor, previous: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return z [.., r] of one slot, and the memory [.., r] for the next one, if it keeps one.

        hidden: [.., H] of the slot. previous: the tokens before the predicted ones, [..]. memory: None at the anchor.
        """
        e = self.markov_w1(previous)
        if self.markov_type == "vanilla":
            return e, None
        if self.markov_type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, e], -1))) * e, None
        memory = torch.zeros_like(e) if memory is None else memory
        gate, candidate, output = self.joint_proj(torch.cat([memory, e, hidden], -1)).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(output), kept * memory + (1 - kept) * torch.tanh(candidate)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return z [A, n, r] of all slots of A blocks. hidden: [A, n, H]. previous: [A, n]."""
        if self.markov_type != "rnn":
            return self.step(hidden, previous)[0]
        memory, outputs = None, []
        for h, token in zip(hidden.unbind(1), previous.unbind(1), strict=True):
            z, memory = self.step(h, token, memory)
            outputs.append(z)
        return torch.stack(outputs, 1)


class ConfidenceHead(nn.Module):
    """Log-odds that a slot's token is accepted, from the slot's state and W1[previous token]; it never sees the token.

    That keeps a draft cut by it unbiased (DSpark, appendix A).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


@dataclass(frozen=True)
class DocumentBlocks:
    """M blocks of S slots of one document of a flat row, at these anchors, ascending places in the document.

    window: most positions that a slot sees, itself included; with one, a block is causal (vLLM qwen3_dflash.py).
    first, length: of the document's tokens, those from `first` to before `length` are read; those that no slot sees are
    not. start: of the document in the flat row.
    """

    start: int
    anchors: Tensor
    slots: int
    window: int | None
    first: int
    length: int

    @classmethod
    def of(cls, start: int, anchors: Tensor, slots: int, window: int | None = None) -> DocumentBlocks:
        """Lay blocks at anchors [M], on the host, of the document that begins at `start`."""
        # The state of the anchor itself is not there yet when drafting.
        return cls(start, anchors, slots, window, seen_from(int(anchors[0]), window), int(anchors[-1]))

    @property
    def rows(self) -> slice:
        """Rows of the flat row that are read."""
        return slice(self.start + self.first, self.start + self.length)

    def groups(self, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some blocks at a time: their slots among the document's, the read rows that they see, and the mask.

        The mask [m * S, T + m * S], bool, says which of these T rows and of the group's own slots each slot sees.
        """
        per_group = max(1, GROUP_SLOTS // self.slots)
        for number, anchors in enumerate(self.anchors.split(per_group)):
            begin, end = seen_from(int(anchors[0]), self.window), int(anchors[-1])
            visible = self.visible(to_device(anchors, device), begin, end)
            own = number * per_group * self.slots
            yield slice(own, own + len(visible)), slice(begin - self.first, end - self.first), visible

    def visible(self, anchors: Tensor, begin: int, end: int) -> Tensor:
        """Return which of the document's rows [begin, end) and of the blocks' slots each slot of these blocks sees."""
        device, window = anchors.device, self.window
        block = torch.arange(len(anchors), device=device).repeat_interleave(self.slots)  # [m * S]
        slot = torch.arange(self.slots, device=device).repeat(len(anchors))
        place = torch.arange(begin, end, device=device)
        context, own = place < anchors[block][:, None], block[:, None] == block
        if window is not None:
            context &= place > (anchors[block] + slot)[:, None] - window
            own &= (slot <= slot[:, None]) & (slot > slot[:, None] - window)
        return torch.cat([context, own], 1)


def seen_from(anchor: int, window: int | None) -> int:
    """Return the first place that the block at an anchor sees."""
    return 0 if window is None else max(0, anchor - window + 1)


class BlockNet(DraftHead):
    """Layers over blocks and the target's states, the norm behind them, and the Markov and confidence heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.llama.rms_eps
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DecoderLayer(config.llama) for _ in range(config.llama.num_layers))
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        # The slots of a block may stand behind the context's end.
        add_rope_table(self, config.llama, config.max_position + config.block_size)

    def read(self, states: Tensor) -> Tensor:
        """Join the states [.., n H] of the target's n layers to context states [.., H]."""
        return self.hidden_norm(self.fc(states))

    def forward(self, embeds: Tensor, states: Tensor, documents: Sequence[DocumentBlocks]) -> Tensor:
        """Return the states [M, S, H] after the final norm of all slots of M blocks, document by document.

        embeds: [M, S, H], of the anchors and the mask token. states: [N, n H] of the target, of a flat row.
        """
        blocks, slots, size = embeds.shape
        device = embeds.device
        context = self.read(torch.cat([states[own.rows] for own in documents]))  # [C, H], documents end to end
        before = torch.cat([torch.arange(own.first, own.length) for own in documents])  # [C]
        anchors = torch.cat([own.anchors for own in documents])
        at = (anchors[:, None] + torch.arange(slots)).flatten()  # [Q]
        x = embeds.flatten(0, 1)  # [Q, H]
        places = to_device(torch.cat([before, at]).clamp_max(len(self.cos) - 1), device)
        cos, sin = self.cos[places][:, None].to(x.dtype), self.sin[places][:, None].to(x.dtype)  # [C + Q, 1, D]
        groups = [list(own.groups(device)) for own in documents]
        layers: Any = self.layers
        for layer in layers:
            x = self._layer(layer, x, context, cos, sin, groups)
        return self.norm(x).view(blocks, slots, size)

    def _layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
        groups: Sequence[Sequence[tuple[slice, slice, Tensor]]],
    ) -> Tensor:
        """Run one layer on all slots x [Q, H]. groups: of each document (`DocumentBlocks.groups`)."""
        attention, seen = layer.self_attn, len(context)
        normed = layer.input_layernorm(x)
        both = torch.cat([context, normed])  # [C + Q, H]
        query = attention.q_proj(normed).view(len(x), -1, attention.head_dim)
        key, value = (
            project(both).view(len(both), -1, attention.head_dim) for project in (attention.k_proj, attention.v_proj)
        )
        if attention.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        # Under autocast rotated queries and keys are wider than values.
        query = rotate(query, cos[seen:], sin[seen:]).to(value.dtype)
        key = rotate(key, cos, sin).to(value.dtype)
        mixed, rows, slots = [], 0, seen
        # Blocks of a document that stand near each other are attended to together: they see much the same.
        for document in groups:
            for own, read, visible in document:
                of_slots = slice(slots + own.start, slots + own.stop)
                of_rows = slice(rows + read.start, rows + read.stop)
                keys, values = (torch.cat([part[of_rows], part[of_slots]]) for part in (key, value))  # [T + q, .., D]
                queries = query[own.start + slots - seen : own.stop + slots - seen]
                mixed.append(attend(queries, keys, values, visible))
            rows += document[-1][1].stop
            slots += document[-1][0].stop
        x = x + attention.o_proj(torch.cat(mixed))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attend with queries [q, heads, D] to keys and values [S, kv_heads, D] by the mask [q, S]: [q, heads * D]."""
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    shared = repeats > 1 and takes_shared(key)
    if repeats > 1 and not shared:  # asked for both, CUDA stores all scores
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=shared)
    return attended[0].transpose(0, 1).flatten(1)


def default_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return the `count` layers of a target whose outputs are read, evenly spaced from the second to the last but two.

    They are numbered as in `BlockConfig.aux_layers`, one above DeepSpec's `target_layer_ids` (z-lab/dflash,
    build_target_layer_ids).
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    last = num_layers - 3
    return tuple(1 + round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def layers_like(target: LlamaConfig, num_layers: int, window: int | None = None) -> LlamaConfig:
    """Return layers as block drafters have them in every server: like the target's, of Qwen3's form."""
    return layers_of(target, num_layers=num_layers, **PLAIN | {"qk_norm": True, "sliding_window": window})
