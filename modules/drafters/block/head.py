"""Block drafters: DFlash, DFlash2 and DSpark (deepseek-ai/DeepSpec, z-lab/dflash): alignment, loss."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.drafters.base import DocumentParts, TargetWeights, TrainStep
from draftsmith.modules.drafters.block.drafter import SlotNet
from draftsmith.modules.drafters.block.net import (
    GROUP_SLOTS,
    BlockConfig,
    BlockNet,
    DFlash2Config,
    DocumentBlocks,
    default_layers,
    layers_like,
    seen_from,
)
from draftsmith.modules.drafters.settings import BlockSettings, DFlash2Settings, DFlashSettings, DSparkSettings, Options
from draftsmith.modules.llama_config import LlamaConfig, captured_layers
from draftsmith.modules.losses import (
    LmHead,
    Selection,
    TokenLoss,
    compare_blocks,
    sampled_columns,
)
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import FeatureBatch, LossOutput

# Layers of the target that are read by default, as in every published head; fewer of a target of fewer than eight.
NUM_STATES = 5


# Alignment. The block of anchor a drafts tokens j = 1 .. n, each from its slot: j - 1 (anchor-first) or j (fill-in).
#
#   token j                  1          2          3        ...
#   text's token, label      x_{a+1}    x_{a+2}    x_{a+3}
#   previous token           x_a        x_{a+1}    x_{a+2}        read by Markov head, selector and confidence head
#   final state of target    a          a+1        a+2            gives the target's distribution of the token
#   context                  the states before a, never that of a itself, in all of them
@dataclass(frozen=True)
class Blocks:
    """Blocks of a `FeatureBatch` whose tokens and features are laid out flat, [N].

    documents: blocks of each document that has any. On the host, so that no device is waited for: anchors [M], their
    flat places; counted [M, n] bool, token j of the block lies in the answer, and so do all before it.
    """

    documents: tuple[DocumentBlocks, ...]
    anchors: Tensor
    counted: Tensor

    @classmethod
    def of(cls, batch: FeatureBatch, settings: BlockSettings, config: BlockConfig, step: TrainStep | None) -> Blocks:
        """Draw blocks of the batch; without a step the same ones for the same batch."""
        drafts, documents, anchors, counted = drafts_of(settings, config, step), [], [], []
        loss_mask = batch.loss_mask.flatten().cpu()
        for number, (start, length) in enumerate(spans(batch)):
            places = candidates(loss_mask[start : start + length])
            if len(places) > settings.anchors and step is None:
                places = places[torch.linspace(0, len(places) - 1, settings.anchors).round().long()]
            elif step is not None and len(places) > settings.anchors:
                rng = torch.Generator().manual_seed(step.seeds[number])
                places = places[torch.randperm(len(places), generator=rng)[: settings.anchors]].sort().values
            if step is not None and step.span is not None:
                places = places[(places + start >= step.span[0]) & (places + start < step.span[1])]
            if not len(places):
                continue
            window = F.pad(loss_mask[start : start + length], (0, drafts)).unfold(0, drafts, 1)  # [T + 1, n]
            counted.append(window[places + 1].long().cumprod(1).bool())
            anchors.append(places + start)
            documents.append(DocumentBlocks.of(start, places, config.slots(drafts), config.reach))
        if not documents:
            none = torch.zeros(0, dtype=torch.int64)
            return cls((), none, none.bool()[:, None].expand(0, drafts))
        return cls(tuple(documents), torch.cat(anchors), torch.cat(counted))

    def predictions(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """List the N tokens that count in the order of the text, of so many tokens. All is on the host.

        Returns: block and token [N] of each in `counted`; behind [M, n], the flat place of the token before each one;
        the P different places at which they are predicted, and position [N], which of these is each one's.
        """
        # Tokens that leave the batch do not count.
        behind = (self.anchors[:, None] + torch.arange(self.counted.shape[1])).clamp_max(length - 1)
        block, token = self.counted.nonzero().unbind(1)
        order = behind[block, token].argsort(stable=True)
        block, token = block[order], token[order]
        return block, token, behind, *behind[block, token].unique_consecutive(return_inverse=True)


def drafts_of(settings: BlockSettings, config: BlockConfig, step: TrainStep | None) -> int:
    """Return the tokens of this step's blocks, the same on every rank and in every part of the step."""
    if step is None or not settings.vary_block:
        return config.drafts
    return random.Random(step.number).randint(2, config.drafts)


def spans(batch: FeatureBatch) -> list[tuple[int, int]]:
    """Return start and length of each text in the flattened batch."""
    rows, width = batch.input_ids.shape
    if batch.lengths is not None:
        starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
        return list(zip(starts, batch.lengths, strict=False))
    lengths = [width] * rows if batch.attention_mask is None else batch.attention_mask.sum(-1).tolist()
    return [(row * width, length) for row, length in enumerate(lengths)]


def candidates(loss_mask: Tensor) -> Tensor:
    """Return the places of a text [T] where a block may begin: an answer's token behind which the answer goes on."""
    place = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    # The first token has nothing before it to read.
    return place[place > 0]


class BlockHead(BlockNet):
    """Drafts a block of tokens in one pass over the target's states."""

    default_k = 7
    Config: ClassVar[type] = BlockConfig
    Settings: ClassVar[type] = BlockSettings
    depth_option = "block"
    takes_spans = True

    @classmethod
    def needs_gathered_weights(cls, settings: BlockSettings) -> bool:
        # The tables of the Markov head or selector.
        return True

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        for name, module in self.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                # New convolutions change nothing.
                torch.nn.init.normal_(module.weight, std=0.0 if name.endswith("kernel_projection") else 0.02)
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        if self.markov_head is not None:
            # Without answers to count it begins as a head without one.
            torch.nn.init.zeros_(self.markov_head.markov_w2.weight)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    # -- a new head

    @classmethod
    def new_config(cls, settings: BlockSettings, target: LlamaConfig) -> BlockConfig:
        count = min(NUM_STATES, max(1, target.num_layers - 3))
        aux_layers = captured_layers(settings.layers, default_layers(target.num_layers, count), target)
        mask = target.vocab_size - 1 if settings.mask_token is None else settings.mask_token
        given = {name: vars(settings).get(name) for name in settings.new}
        shape = settings.new | {name: value for name, value in given.items() if value is not None}
        layers = layers_like(target, shape.pop("num_layers"), settings.window or None)
        block = shape.pop("block")
        return cls.Config(layers, aux_layers, block + (shape["layout"] == "fill-in"), mask, **shape)

    @classmethod
    def shape(cls, config: BlockConfig) -> Options:
        layers = {"layers": config.aux_layers, "num_layers": config.llama.num_layers}
        sizes = {"block": config.drafts, "window": config.llama.sliding_window or 0}
        return super().shape(config) | layers | sizes

    def freeze(self, settings: BlockSettings) -> None:
        if self.config.draft_vocab_size is not None:
            self.lm_head.requires_grad_(False)

    def start(self, weights: TargetWeights) -> None:
        if self.markov_head is not None and weights.pair_counts is not None:
            self.markov_head.start(weights.pair_counts())

    # -- loss

    @classmethod
    def loss_layers(cls, config: BlockConfig, num_layers: int) -> tuple[int, ...]:
        """Return its layers and, last, the final state, which gives the target's distributions."""
        return (*config.aux_layers, final_state(num_layers))

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: BlockSettings) -> float:
        """Count the blocks."""
        mask = batch.loss_mask.flatten().cpu()
        blocks = (len(candidates(mask[start : start + length])) for start, length in spans(batch))
        return sum(min(count, settings.anchors) for count in blocks)

    @classmethod
    def logit_rows(cls, batch: FeatureBatch, settings: BlockSettings) -> int:
        return int(cls.loss_count(batch, settings)) * (settings.block or settings.new["block"])

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: BlockSettings, step: TrainStep | None
    ) -> LossOutput:
        """Return the mean over blocks of their tokens' losses, a block's weights adding up to 1.

        By `decay`, a block that the end of the answer cuts short counts for what is left of it.
        """
        assert batch.features is not None, "the target reads the batch first"
        config, dtype = self.config, self.fc.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        blocks = Blocks.of(batch, settings, config, step)
        count = self.loss_count(batch, settings) if step is None or step.loss_count is None else step.loss_count
        if not blocks.documents:
            nothing = torch.stack([parameter.sum() for parameter in self.parameters()]).sum() * 0.0
            zero = torch.zeros((), device=batch.input_ids.device)
            return LossOutput(nothing, {"loss": zero}, {"loss": zero})
        ids, features = batch.input_ids.flatten(), batch.features.flatten(0, 1)  # [T], [T, n H + H]
        size, device = config.hidden_size, ids.device

        # 1. N predictions of M blocks of n tokens, in the order of the text, because blocks overlap.
        block, token, behind, positions, position = blocks.predictions(len(ids))
        anchors, block, token, behind, positions, counted = (
            to_device(part, device) for part in (blocks.anchors, block, token, behind, positions, blocks.counted)
        )
        places = behind[block, token]  # [N]
        labels, previous = ids[places + 1], ids[places]  # [N] each

        # 2. One pass over all blocks.
        slots = ids.new_full((len(anchors), config.slots(counted.shape[1])), config.mask_token)
        slots[:, 0] = ids[anchors]
        hidden = self(target.embed(slots).to(dtype), features[:, :-size].to(dtype), blocks.documents)
        hidden = hidden[:, config.first_slot :]  # [M, n, H]
        rows = hidden[block, token]  # [N, H]
        markov, selection = None, None
        if self.candidate_selector is not None:
            assert isinstance(settings, DFlash2Settings)
            z, successors = self.candidate_selector(hidden, ids[behind]), self.candidate_selector.successor_codebook
            selection = Selection(z[block, token], successors, config.selector_top_k, settings.selector_weight)
        if self.markov_head is not None:
            z = self.markov_head(hidden, ids[behind])  # [M, n, r]
            markov = z[block, token], self.markov_head.markov_w2.weight  # [N, r], [draft vocabulary, r]

        # 3. The target's distributions of the tokens, over the whole vocabulary or sampled columns.
        wanted = features[positions, -size:].to(target.dtype)  # [P, H]
        lm_head: LmHead = target.lm_head
        vocab_size, log_counts = config.vocab_size, None
        sampled = 0 < settings.loss_vocab < target.info.vocab_size
        own_lm_head = None if self.tokens is None else partial(F.linear, weight=self.lm_head.weight)
        if sampled and step is not None and own_lm_head is None:
            rng = torch.Generator().manual_seed(step.seeds[0])
            columns = sampled_columns(lm_head, wanted, labels, settings.loss_vocab, rng)
            lm_head = target.lm_head_of(columns.tokens)
            labels, log_counts, vocab_size = columns.places(labels), columns.log_counts, len(columns.tokens)
            markov = None if markov is None else (markov[0], markov[1][columns.tokens])
            if selection is not None:
                selection = selection._replace(successors=selection.successors[columns.tokens])

        # 4. The loss, weighted by a token's place in its block.
        decay = torch.exp(-torch.arange(counted.shape[1], device=device, dtype=wide) / settings.decay)
        weights = (decay / decay.sum())[token]  # [N]
        compared = compare_blocks(
            lm_head, vocab_size, wanted, rows, position, labels, weights, markov, settings.ce_weight,
            settings.l1_weight, log_counts, cast("TokenLoss | None", settings.loss), selection, own_lm_head,
            self.tokens,
        )  # fmt: skip
        total, sums = compared.total, dict[str, Tensor]()

        # 5. The confidence head learns from the outcome.
        if self.confidence_head is not None:
            logit = self.confidence(rows, previous).to(wide)  # [N]
            entropy = (weights * F.binary_cross_entropy_with_logits(logit, compared.accepted, reduction="none")).sum()
            total = total + entropy
            sums["confidence_loss"] = entropy.detach()

        # 6. What is logged: of first tokens.
        sums["loss"] = total.detach()
        # Of a span fewer than `count`.
        counts = dict.fromkeys(sums, torch.full((), float(len(anchors)), device=device))
        first = token == 0
        sums |= {"top1": (compared.right & first).sum(), "accepted": (compared.accepted * first).sum()}
        counts |= dict.fromkeys(("top1", "accepted"), first.sum())
        return LossOutput(total / max(count, 1), sums, counts)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the confidence head's log-odds [..] for slots of states [.., H] behind these tokens [..]."""
        assert self.confidence_head is not None
        parts = [hidden] if self.markov_head is None else [hidden, self.markov_head.markov_w1(previous)]
        return self.confidence_head.proj(torch.cat(parts, -1))[..., 0]

    def loss_memory(
        self, settings: BlockSettings, parts: DocumentParts, share: float, width: int
    ) -> tuple[float, float]:
        config, llama, size = self.config, self.config.llama, self.config.hidden_size
        queries, keys = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim
        norm, slots, context, copied, masked = 4 + width, 0.0, 0, 0.0, 0.0
        for start, stop, length in parts:
            first = seen_from(start, config.reach)
            own = config.slots(config.drafts) * min(settings.anchors, share * length) * (stop - start) / length
            slots, context, groups = slots + own, context + stop - first, math.ceil(own / GROUP_SLOTS)
            for group in range(groups):
                begin, end = (start + (stop - start) * place / groups for place in (group, group + 1))
                for mask in config.masks:
                    seen = end - seen_from(int(begin), mask.window) + own / groups
                    copied, masked = copied + seen, masked + seen * own / groups
        # A norm keeps its input and the normalized one, a product its input; attention its mask and copies of the keys.
        layer = slots * (2 * (norm + width) * size + (norm + 3 * width) * queries)
        layer += slots * 4 * width * llama.intermediate_size + context * width * size + (context + slots) * norm * keys
        # Convolutions keep a state and its kernels, before and behind both sublayers.
        layer += slots * size * 4 * width * (2 + config.conv_kernel if config.conv_kernel else 0)
        once = context * (width * len(config.aux_layers) + norm) * size + slots * (norm + 8) * size
        once += width * (2 * keys * copied + masked)
        return llama.num_layers * layer + once, slots * config.drafts / config.slots(config.drafts)

    # -- drafter

    @property
    def longest_draft(self) -> int:
        return self.config.drafts

    def net(self, target: CausalLM) -> SlotNet:
        return SlotNet(self, target)


class DFlashHead(BlockHead):
    """DFlash: drafts a block in one pass, each token from its slot alone; the target's embedding and whole lm_head are
    not in this directory."""

    kind = "dflash"
    drafts = ("chain", "tree", "static")
    Settings: ClassVar[type] = DFlashSettings


class DFlash2Head(BlockHead):
    """DFlash2: drafts a block in one pass with convolutions over its slots; a selector then chooses each token among
    its slot's likeliest, by the token before. The target's embedding and whole lm_head are not in this directory."""

    kind = "dflash2"
    drafts = ("chain", "tree", "static")
    Config: ClassVar[type] = DFlash2Config
    Settings: ClassVar[type] = DFlash2Settings


class DSparkHead(BlockHead):
    """DSpark: drafts a block in one pass; a Markov head then lets each token depend on the one before it, and a
    confidence head says how likely each is accepted. The target's embedding and whole lm_head are not in this
    directory."""

    kind = "dspark"
    drafts = ("chain", "tree", "static", "confidence")
    Settings: ClassVar[type] = DSparkSettings
