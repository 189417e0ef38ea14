"""Network of a block drafter: DFlash, DSpark's Markov and confidence heads (deepseek-ai/DeepSpec, modeling/dspark), and
DFlash2's convolutions and selector (z-lab/dflash, model.py).

One pass drafts a whole block: a few decoder layers read the last token, the anchor, and mask tokens behind it. Their
queries come from the block, their keys and values from the block and from the target's states of everything before the
anchor:

    context t < a      c_t = norm(fc([states of the target's layers at t])), the same in every layer
    block of anchor a  slots a, a+1, ..: the embeddings of [x_a, MASK, MASK, ..], which all see each other, or in causal
                       layers those before them; a layer with a window sees the last positions only
    logits of a slot   lm_head(norm(h)), of the target, plus W2 z(previous token) of the Markov head, or reranked by
                       the selector

Modules are named as in DeepSpec's files, which vLLM, SGLang and llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.vocabulary import VocabularyHead
from draftsmith.modules.engine.cache import attend
from draftsmith.modules.layers import Attend, DecoderLayer, RMSNorm
from draftsmith.modules.llama_config import MOST_LAYERS, MOST_SIZE, PLAIN, CaptureConfig, LlamaConfig, layers_of
from draftsmith.modules.rotary import add_rope_table, rope_at
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import InputError, check_config, check_range

# Published blocks have 5 to 16 slots.
MOST_SLOTS = 256
# Slots that are attended to together while training: a larger group computes more that its mask hides.
GROUP_SLOTS = 1024
# Of a new Markov head: the count of a token that no answer has, and singular vectors beyond those that it takes, which
# make these more exact.
UNSEEN, SPARE = 0.1, 16

Layout = Literal["anchor-first", "fill-in"]


class LayerMask(NamedTuple):
    """Keys that a layer's slots see.

    window: most positions up to the slot, its own included; None: all. causal: no later slots of the block.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class BlockConfig(CaptureConfig):
    """Config of a block drafter. llama: its layers, with q/k norms, as in Qwen3.

    block_size: slots of the blocks that it was trained on, the anchor's among them. mask_token: fills the others.
    layout: `anchor-first`, slot s predicts token s + 1 behind the anchor (DSpark); `fill-in`, slot s predicts token s,
        and the anchor's nothing (DFlash).
    markov_rank: width of the Markov head, 0 without one. markov_type: its inputs (`MarkovHead`).
    confidence: it has a confidence head.
    draft_vocab_size: tokens that it can draft, the rows of its own lm_head; None: all, by the target's.
    full_layers: layers without the window that the others have.
    causal: layers are causal within a block; None: those with a window, and others not.
    """

    block_size: int
    mask_token: int
    layout: Layout = "anchor-first"
    markov_rank: int = 0
    markov_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = False
    draft_vocab_size: int | None = None
    full_layers: tuple[int, ...] = ()
    causal: bool | None = None
    windowed = True
    # Of DFlash2 alone.
    conv_kernel = conv_group = selector_rank = selector_top_k = 0

    def __post_init__(self) -> None:
        # A list comes from JSON.
        if isinstance(self.full_layers, list):
            object.__setattr__(self, "full_layers", tuple(self.full_layers))
        if self.causal is None and not self.full_layers:
            object.__setattr__(self, "causal", self.llama.sliding_window is not None)
        super().__post_init__()
        check_config(
            self,
            block_size=(1 + self.first_slot, MOST_SLOTS),
            mask_token=(0, self.vocab_size - 1),
            markov_rank=(0, MOST_SIZE),
            draft_vocab_size=(1, self.vocab_size - 1),
            full_layers=(0, self.llama.num_layers - 1),
        )
        check_range("num_layers", self.llama.num_layers, 1, MOST_LAYERS)
        distinct = list(self.full_layers) == sorted(set(self.full_layers))
        windowed = self.llama.sliding_window is not None and len(self.full_layers) < self.llama.num_layers
        if self.full_layers and not (distinct and windowed):
            expected = "some layers, ascending, of a head whose others have a window"
            raise InputError("full_layers", list(self.full_layers), expected, "Correct it.")

    def with_window(self, window: int | None) -> Self:
        plain = self if window else replace(self, full_layers=(), causal=bool(self.causal))
        return super(BlockConfig, plain).with_window(window)

    @property
    def masks(self) -> tuple[LayerMask, ...]:
        """The mask of each layer."""
        full, window = self.full_layers, self.llama.sliding_window
        windows = (None if layer in full else window for layer in range(self.llama.num_layers))
        return tuple(LayerMask(own, own is not None if self.causal is None else self.causal) for own in windows)

    @property
    def reach(self) -> int | None:
        """Most positions that any layer sees; None: all."""
        return None if self.full_layers else self.llama.sliding_window

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


@dataclass(frozen=True)
class DFlash2Config(BlockConfig):
    """Config of a DFlash2 head.

    conv_kernel: slots that a convolution reads, its own and those before. conv_group: channels that share what a slot
        adds to its kernel.
    selector_rank: width of the selector's tables. selector_top_k: likeliest tokens of a slot that it chooses among.
    """

    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        conv = {"conv_kernel": (1, self.block_size), "conv_group": (1, self.hidden_size)}
        check_config(self, **conv, selector_rank=(1, MOST_SIZE), selector_top_k=(1, self.vocab_size))
        if self.hidden_size % self.conv_group:
            raise InputError("conv_group", self.conv_group, f"a divisor of {self.hidden_size}", "Change it.")
        if self.markov_rank:
            raise InputError("markov_rank", self.markov_rank, "0: a selector takes its place", "Leave it out.")
        if self.draft_vocab_size is not None:
            expected = "none: a selector chooses among the target's whole vocabulary"
            raise InputError("draft_vocab_size", self.draft_vocab_size, expected, "Leave it out.")


class MarkovHead(nn.Module):
    """Adds W2 z to a token's logits, where z depends on the token before it, e = W1[previous] (DSpark, section 3).

    vanilla: z = e. gated: z = sigmoid(gate([h; e])) * e, h the slot's state. rnn: [g, c, o] = joint([s; e; h]), the
    memory s becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), and z = tanh(o).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, rank, self.markov_type = config.hidden_size, config.markov_rank, config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.markov_type == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    @torch.no_grad()
    def start(self, counts: Tensor) -> None:
        """Begin as the bigram model of the answers, as closely as the rank allows.

        counts: [V, V] sparse, how often a token (column) follows another (row). With a prior of the tokens' shares p_v
        that weighs as much as one token, log P(v | u) is log p_v + log(1 + counts[u, v] / p_v), up to a constant of the
        row: zero for pairs that do not occur. Its largest singular vectors are those of the matrix whose rows and
        columns are weighted by the square roots of their counts, so that frequent tokens are the nearest.
        """
        rank = self.markov_w1.weight.shape[1]
        before, behind = (torch.sparse.sum(counts, dim).to_dense() for dim in (1, 0))
        share = (behind + UNSEEN) / (behind + UNSEEN).sum()
        by_row, by_column = before.clamp_min(1).sqrt(), behind.clamp_min(1).sqrt()
        row, column = counts.indices()
        values = (1 + counts.values() / share[column]).log() * by_row[row] * by_column[column]
        weighted = torch.sparse_coo_tensor(counts.indices(), values, counts.shape, check_invariants=False)
        u, s, v = torch.svd_lowrank(weighted, min(rank + SPARE, len(counts)))
        kept, log_share = min(rank - 1, len(s)), share.log()
        # The first column is that of p_v. A rank beyond the vocabulary leaves some without effect.
        w1, w2 = self.markov_w1.weight, self.markov_w2.weight.zero_()
        w1[:, 0], w2[:, 0] = 1.0, log_share - log_share.mean()
        w1[:, 1 : kept + 1] = (u * s.sqrt() / by_row[:, None])[:, :kept]
        w2[:, 1 : kept + 1] = (v * s.sqrt() / by_column[:, None])[:, :kept]

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

    def add(self, logits: Tensor, z: Tensor) -> Tensor:
        """Return the logits [.., draft vocabulary] of tokens, from those of their slots and z [.., r]."""
        return logits + self.markov_w2(z)


class Selector(nn.Module):
    """Chooses among a slot's K likeliest tokens by their logits and <z, B[token]>, z = A[token before] * W h (DFlash2).

    No other token is drafted: the distribution q is that over these K.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        shape, self.top_k = (config.vocab_size, config.selector_rank), config.selector_top_k
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(shape))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def step(self, hidden: Tensor, previous: Tensor, memory: Tensor | None = None) -> tuple[Tensor, None]:
        """Return z [.., r] of slots of states [.., H] behind the tokens [..], and no memory (`MarkovHead.step`)."""
        return self.predecessor_codebook[previous] * self.hidden_projection(hidden), None

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.step(hidden, previous)[0]

    def add(self, logits: Tensor, z: Tensor) -> Tensor:
        """Return logits [.., V] of the K candidates, -inf elsewhere, from those of the slots [.., V] and z [.., r]."""
        unary, candidates = logits.topk(self.top_k)  # [.., K]
        scores = unary + (z[..., None, :] * self.successor_codebook[candidates]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)


class GroupedConv(nn.Module):
    """Two causal convolutions over the slots of a block, before and behind a sublayer, with kernels of the slots
    (DFlash2).

    y_s = sum over t of (base_t + delta_t(s)) * x_{s-t}, where the deltas of both are one product of the state before
    the sublayer, and neighboring channels share them. A new one changes nothing.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, kernel, groups = config.hidden_size, config.conv_kernel, config.hidden_size // config.conv_group
        self.shape = 2, kernel, groups
        self.base_kernel = nn.Parameter(torch.eye(kernel)[:1].T.repeat(2, 1, size))  # [2, kernel, H]
        self.kernel_projection = nn.Linear(size, 2 * kernel * groups, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [.., S, H] convolved for the sublayer, and the deltas [.., S, kernel, groups] for `behind`."""
        own, behind = self.kernel_projection(x).unflatten(-1, self.shape).unbind(-3)
        return self._convolve(x, own, 0), behind

    def behind(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return what the sublayer gave, x [.., S, H], convolved."""
        return self._convolve(x, delta, 1)

    def _convolve(self, x: Tensor, delta: Tensor, which: int) -> Tensor:
        _, kernel, groups = self.shape
        weight = self.base_kernel[which].unflatten(-1, (groups, -1)) + delta[..., None]  # [.., S, kernel, groups, C]
        x = x.unflatten(-1, (groups, -1))  # [.., S, groups, C]
        total = weight[..., 0, :, :] * x
        for tap in range(1, min(kernel, x.shape[-3])):
            total = total + weight[..., tap, :, :] * F.pad(x[..., :-tap, :, :], (0, 0, 0, 0, tap, 0))
        return total.flatten(-2)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return sublayer(x) between the convolutions, for whole blocks x [.., S, H]."""
        x, delta = self.before(x)
        return self.behind(sublayer(x), delta)


class BlockLayer(DecoderLayer):
    """Layer of a block drafter, whose sublayers stand between convolutions if its config has any."""

    def __init__(self, config: BlockConfig):
        super().__init__(config.llama)
        self.attention_conv, self.mlp_conv = (GroupedConv(config) if config.conv_kernel else None for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run the layer on whole blocks x [.., S, H]."""
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(x, cos, sin, attend)
        normed, x = self.enter(x)
        x = x + self.attention_conv(normed, partial(self.self_attn, cos=cos, sin=sin, attend=attend))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


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

    first, length: of the document's tokens, those from `first` to before `length` are read; those that no slot sees are
    not. start: of the document in the flat row.
    """

    start: int
    anchors: Tensor
    slots: int
    first: int
    length: int

    @classmethod
    def of(cls, start: int, anchors: Tensor, slots: int, reach: int | None = None) -> DocumentBlocks:
        """Lay blocks at anchors [M], on the host, of the document that begins at `start`.

        reach: of the head's config.
        """
        # The state of the anchor itself is not there yet when drafting.
        return cls(start, anchors, slots, seen_from(int(anchors[0]), reach), int(anchors[-1]))

    @property
    def rows(self) -> slice:
        """Rows of the flat row that are read."""
        return slice(self.start + self.first, self.start + self.length)

    def groups(self, device: torch.device, mask: LayerMask) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some blocks at a time: their slots among the document's, the read rows that they see, and which.

        That is [m * S, T + m * S], bool: which of these T rows and of the group's own slots each slot sees.
        """
        per_group = max(1, GROUP_SLOTS // self.slots)
        for number, anchors in enumerate(self.anchors.split(per_group)):
            begin, end = seen_from(int(anchors[0]), mask.window), int(anchors[-1])
            visible = self.visible(to_device(anchors, device), begin, end, mask)
            own = number * per_group * self.slots
            yield slice(own, own + len(visible)), slice(begin - self.first, end - self.first), visible

    def visible(self, anchors: Tensor, begin: int, end: int, mask: LayerMask) -> Tensor:
        """Return which of the document's rows [begin, end) and of the blocks' slots each slot of these blocks sees."""
        device, window = anchors.device, mask.window
        block = torch.arange(len(anchors), device=device).repeat_interleave(self.slots)  # [m * S]
        slot = torch.arange(self.slots, device=device).repeat(len(anchors))
        place = torch.arange(begin, end, device=device)
        context, own = place < anchors[block][:, None], block[:, None] == block
        if window is not None:
            context &= place > (anchors[block] + slot)[:, None] - window
            own &= slot > slot[:, None] - window
        if mask.causal:
            own &= slot <= slot[:, None]
        return torch.cat([context, own], 1)


def seen_from(anchor: int, window: int | None) -> int:
    """Return the first place that the block at an anchor sees."""
    return 0 if window is None else max(0, anchor - window + 1)


class BlockNet(VocabularyHead, DraftHead):
    """Layers over blocks and the target's states, the norm behind them, and the heads behind that.

    It has an lm_head only if its vocabulary is reduced.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.llama.rms_eps
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        layers = nn.ModuleList(BlockLayer(config) for _ in range(config.llama.num_layers))
        self.layers = cast("Sequence[BlockLayer]", layers)
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = Selector(config) if config.selector_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        if config.draft_vocab_size is not None:
            self.add_lm_head(config, config.draft_vocab_size)
        # The slots of a block may stand behind the context's end.
        add_rope_table(self, config.llama, config.max_position + config.block_size)

    @property
    def sequential(self) -> MarkovHead | Selector | None:
        """The part that lets a token depend on the one before it."""
        return self.markov_head or self.candidate_selector

    def read(self, states: Tensor) -> Tensor:
        """Join the states [.., n H] of the target's n layers to context states [.., H]."""
        return self.hidden_norm(self.fc(states))

    def forward(self, embeds: Tensor, states: Tensor, documents: Sequence[DocumentBlocks]) -> Tensor:
        """Return the states [M, S, H] after the final norm of all slots of M blocks, document by document.

        embeds: [M, S, H], of the anchors and the mask token. states: [N, n H] of the target, of a flat row.
        """
        device, slots = embeds.device, embeds.shape[1]
        context = self.read(torch.cat([states[own.rows] for own in documents]))  # [C, H], documents end to end
        before = torch.cat([torch.arange(own.first, own.length) for own in documents])  # [C]
        anchors = torch.cat([own.anchors for own in documents])
        rotary = partial(rope_at, self.cos, self.sin, dtype=embeds.dtype)
        of_context = rotary(to_device(before, device))  # [C, 1, D] each
        of_slots = rotary(to_device(anchors[:, None] + torch.arange(slots), device))  # [M, S, 1, D] each
        masks = self.config.masks
        groups = {mask: [list(own.groups(device, mask)) for own in documents] for mask in set(masks)}
        x = embeds
        for layer, mask in zip(self.layers, masks, strict=True):
            seen = layer.self_attn.keys_values(context, *of_context)
            x = layer(x, *of_slots, partial(attend_blocks, context=seen, groups=groups[mask]))
        return self.norm(x)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    context: tuple[Tensor, Tensor],
    groups: Sequence[Sequence[tuple[slice, slice, Tensor]]],
) -> Tensor:
    """Attend from the slots of M blocks to these and to what stands before them (`layers.Attend`): [M, S, heads, D].

    query, key, value: [M, S, .., D]. context: key and value [C, kv_heads, D]. groups: of each document
    (`DocumentBlocks.groups`).
    """
    # Under autocast rotated queries and keys are wider than values.
    queries, keys, values = (part.flatten(0, 1).to(value.dtype) for part in (query, key, value))  # [Q, .., D]
    context_keys, context_values = (part.to(value.dtype) for part in context)
    shared = query.shape[-2] // key.shape[-2]  # heads that share a key
    mixed, rows, slots = [], 0, 0
    # Blocks of a document that stand near each other are attended to together: they see much the same.
    for document in groups:
        for own, read, visible in document:
            of_slots = slice(slots + own.start, slots + own.stop)
            of_rows = slice(rows + read.start, rows + read.stop)
            seen_keys = torch.cat([context_keys[of_rows], keys[of_slots]]).transpose(0, 1)  # [kv_heads, T + q, D]
            seen_values = torch.cat([context_values[of_rows], values[of_slots]]).transpose(0, 1)
            mixed.append(attend(queries[of_slots][None], seen_keys[None], seen_values[None], shared, visible)[0])
        rows += document[-1][1].stop
        slots += document[-1][0].stop
    return torch.cat(mixed).view(query.shape)


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
