"""Hydra heads (Ankner et al. 2024): Medusa's made sequential, each reads the tokens drafted before its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.acceptance.head import ResidualBlock
from draftsmith.modules.decoding.branches import as_decoding
from draftsmith.modules.decoding.stop import FixedLengthStop, StopPolicy
from draftsmith.modules.decoding.tree import MAX_NODES, DraftTree, StaticTree
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle.net import EagleConfig, OfLlama
from draftsmith.modules.drafters.feature_heads import FeatureDrafter, FeatureHead
from draftsmith.modules.drafters.growth import Level, grow_static
from draftsmith.modules.drafters.medusa import (
    MOST_BLOCKS,
    MedusaBranches,
    MedusaChain,
    MedusaHead,
    MedusaSettings,
    lm_head_passes,
    lm_heads_of,
)
from draftsmith.modules.drafters.trees import StaticTrees
from draftsmith.modules.engine.lean import LeanNorm, LeanStack
from draftsmith.modules.engine.low_precision import linear_of
from draftsmith.modules.engine.rows import RunLayers, picked_of
from draftsmith.modules.layers import DecoderLayer, LlamaConfig, RMSNorm, rope_table
from draftsmith.modules.packing import Documents
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, SamplingParams, at_most, check_config


@dataclass(frozen=True)
class HydraConfig(OfLlama):
    """Config of Hydra heads: num_heads heads, each an MLP of num_layers layers.

    llama: sizes of the prefix attention, with 1 decoder layer in Hydra++ and none in Hydra. own_lm_head: each head has
    an lm_head of its own, with a bias as published; else all share the target's.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_lm_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self, num_heads=(1, MAX_NODES), num_layers=(1, MOST_BLOCKS))

    @property
    def prefix_attention(self) -> bool:
        return self.llama.num_layers > 0


@dataclass(frozen=True, kw_only=True)
class HydraSettings(MedusaSettings):
    """Train Hydra heads, or with --prefix-attention and --num-layers 4 those of Hydra++. The target stays as it is.

    Attributes:
        num_heads: Heads, and so the tokens of the longest draft. Default: 4, or those of the heads to train on.
        num_layers: Layers of each head's MLP, of which those behind the first are one that is repeated, as published.
            Default: 1, or those of the heads to train on.
        prefix_attention: A decoder layer over all of the target's states gives the heads what they read in the place of
            the last one (Hydra++). Default: off, or what the heads to train on have.
    """

    loss: Literal["hard", "soft"] = "soft"
    prefix_attention: bool | None = None


class GroundedMLP(nn.Module):
    """Network of a head: S x + c + SiLU(W x + b), then one residual block, num_layers - 1 times.

    x is a state and some embeddings side by side. New weights pass the state through.
    """

    def __init__(self, size: int, parts: int, num_layers: int):
        """parts: number of states and embeddings, each of this size."""
        super().__init__()
        self.linear, self.skip = nn.Linear(parts * size, size), nn.Linear(parts * size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.skip.bias)
        nn.init.eye_(self.skip.weight)
        self.block = ResidualBlock(size) if num_layers > 1 else None
        self.repeats = num_layers - 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x) + F.silu(self.linear(x))  # [.., parts * H] -> [.., H]
        for _ in range(self.repeats):
            assert self.block is not None
            x = self.block(x)
        return x


class HydraHead(MedusaHead, FeatureHead):
    """Guesses each of the next tokens from the target's last state and the tokens drafted before it, by a head for each
    (Hydra, Ankner et al. 2024). They have an lm_head each, or read the target's; embeddings are the target's."""

    kind = "hydra"
    Config, Settings = HydraConfig, HydraSettings
    # The recipe of the published repository.
    defaults: ClassVar[dict[str, Any]] = {"epochs": 10, "lr": 5e-4}
    lm_head_bias = True

    cos: Tensor
    sin: Tensor

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        llama = config.llama
        self.layers = nn.ModuleList(DecoderLayer(llama) for _ in range(llama.num_layers))
        self.norm = RMSNorm(llama.hidden_size, llama.rms_eps) if config.prefix_attention else None
        cos, sin = rope_table(llama, llama.max_position)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @classmethod
    def net(cls, config: HydraConfig, number: int) -> nn.Module:
        return GroundedMLP(config.hidden_size, 2 + number, config.num_layers)

    # -- a new head

    @classmethod
    def new_config(cls, settings: Any, target: LlamaConfig) -> HydraConfig:
        layers = int(bool(settings.prefix_attention))
        llama = dataclasses.replace(EagleConfig.for_target(target).llama, num_layers=layers)
        return HydraConfig(llama, settings.num_heads or 4, settings.num_layers or 1, settings.lm_head == "own")

    # -- loss

    def read(self, batch: FeatureBatch) -> Tensor:
        """Return the target's states [B, T, H], through the prefix attention if there is one."""
        states = super().read(batch)
        if self.norm is None:
            return states
        positions, documents = batch.position_ids, None
        if batch.lengths is not None:
            documents = Documents.of(batch.lengths, states.device)
            states, positions = documents.side_by_side(states), documents.side_by_side(positions)  # [D, L, H], [D, L]
        cos, sin = (table[positions][:, None].to(states.dtype) for table in (self.cos, self.sin))  # [B, 1, T, D]
        for layer in self.layers:
            states = layer(states, cos, sin)
        return self.norm(states if documents is None else documents.end_to_end(states))

    def inputs(self, number: int, states: Tensor, counted: Tensor, batch: FeatureBatch, target: CausalLM) -> Tensor:
        """Return state t and the embeddings of tokens t + 1 to t + 1 + number side by side, [N, (2 + number) H]."""
        end = counted.shape[1]
        tokens = [target.embed(batch.input_ids[:, 1 + i : 1 + i + end][counted]) for i in range(1 + number)]
        return torch.cat([states[:, :end][counted], *(embeds.to(states.dtype) for embeds in tokens)], -1)

    @classmethod
    def flops(cls, config: Any, settings: Any, step: TrainStep, logit_rows: int) -> float:
        size, first = config.hidden_size, flops.TRAINED if config.prefix_attention else flops.TRAINED_FIRST
        parts = sum(2 + i for i in range(config.num_heads))
        reading = first * flops.linear(parts * size, 2 * size, logit_rows)
        blocks = flops.TRAINED * config.num_heads * (config.num_layers - 1) * flops.linear(size, size, logit_rows)
        logits = lm_head_passes(config, settings) * flops.lm_head_forward(config.llama, logit_rows)
        layers = flops.TRAINED * flops.layers_forward(config.llama, step.lengths)
        return reading + blocks + config.num_heads * logits + layers

    # -- drafter

    def drafter(self, target: CausalLM, stops: Sequence[StopPolicy], capacity: int) -> HydraDrafter:
        return HydraDrafter(self.like(target), target, stops, capacity)

    def tree_drafter(self, target: CausalLM, shape: Any, capacity: int, rows: int = 1, *_: Any) -> HydraDrafter:
        return HydraDrafter(self.like(target), target, [FixedLengthStop(1)] * rows, capacity, shape=shape)

    def lean(self, target: CausalLM) -> LeanHydra:
        return LeanHydra(self, target)

    def branches(self, target: CausalLM, depth: int) -> HydraBranches:
        at_most("depth", depth, self.config.num_heads)
        return HydraBranches(self.like(target), target, depth)


class LeanHydra:
    """Network for inference: a `feature_heads.FeatureNet` whose layers read the target's states alone, and the heads.

    Without prefix attention it has no layers.
    """

    def __init__(self, head: HydraHead, target: CausalLM):
        pack, precision, layers = target.packed, head.precision, list[Any](head.layers)
        self.stack = LeanStack(
            layers, head.config.llama, target.dtype, target.device, partial(linear_of, pack=pack, precision=precision)
        )
        self._norm = None if head.norm is None else LeanNorm(head.norm.weight, head.norm.eps)
        self._embed, self._lm_heads = target.embed, lm_heads_of(head, target)
        self._first, self._blocks = [], []
        for net in head.heads:
            assert isinstance(net, GroundedMLP)
            # Both maps of the first layer in one product.
            weight = torch.cat([net.skip.weight, net.linear.weight])
            bias = torch.cat([net.skip.bias, net.linear.bias])
            self._first.append(linear_of(weight, bias, pack, precision))
            block = None if net.block is None else net.block.linear
            self._blocks.append([linear_of(block.weight, block.bias, pack, precision)] * net.repeats if block else [])

    def project(self, features: Tensor) -> Tensor:
        return features

    def fuse(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the states: only the heads read tokens."""
        return states

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the logits of the first head's states."""
        return self._lm_heads[0](states)

    def prefix(self, states: Tensor) -> Tensor:
        """Return the heads' input of the layers' outputs."""
        return states if self._norm is None else self._norm(states)

    def next_input(self, read: Tensor, ids: Tensor) -> Tensor:
        """Return the input of the next head: that of the one before it, [.., R], and the embeddings of ids [..]."""
        return torch.cat([read, self._embed(ids)], -1)

    def hidden(self, read: Tensor, number: int) -> Tensor:
        """Return the state [.., H] of a head for its input [.., R]."""
        skipped, x = self._first[number](read).chunk(2, -1)
        x = skipped + F.silu(x)
        for block in self._blocks[number]:
            x = x + F.silu(block(x))
        return x

    def level(self, read: Tensor, number: int) -> Level:
        """Return the states and logits of a head for nodes [B, n, R]."""
        # A flat product is faster than a batch of small ones.
        hidden = self.hidden(read.flatten(0, 1), number)
        logits = self._lm_heads[number](hidden)
        return Level(hidden.view(*read.shape[:2], -1), logits.view(*read.shape[:2], -1))


def read_prefix(
    net: LeanHydra, run: RunLayers, picked: Tensor | slice | None, ids: Any, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the layers and return the heads' input of the picked states, twice: logits come from the heads.

    See `rows.Forward`.
    """
    prefix = net.prefix(picked_of(run(states), picked))
    return prefix, prefix


class HydraDrafter(FeatureDrafter):
    """Drafts chains or, given a shape, trees: each level is one call of its head for all of its nodes."""

    net: LeanHydra
    _forward = staticmethod(read_prefix)

    def __init__(
        self,
        head: HydraHead,
        target: CausalLM,
        stops: Sequence[StopPolicy],
        capacity: int,
        static: bool | None = None,
        shape: StaticTree | None = None,
    ):
        super().__init__(head, target, stops, capacity, static)
        self._longest_draft, self._shape = head.config.num_heads, shape

    def _grow(
        self,
        logits: Tensor,
        hidden: Tensor,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        net, first = self.net, torch.tensor([row.tokens[-1:] for row in self._rows], device=hidden.device)  # [B, 1]
        read = net.next_input(hidden, first)  # [B, 1, 2H]
        level, number = net.level(read, 0), 0

        def expand(tokens: Tensor, above: Tensor, depth: int) -> Level:
            # A node reads what its parent read, and its own token.
            nonlocal read
            read = net.next_input(read.gather(1, above[..., None].expand(-1, -1, read.shape[-1])), tokens)  # [B, n, R]
            return net.level(read, depth)

        if self._shape is not None:
            return grow_static(self._shape, level, expand, limits, params, sources)

        def step(tokens: list[list[int]] | Tensor) -> tuple[Tensor, Tensor]:
            nonlocal number
            number += 1
            # Rows whose chain has ended read token 0.
            ids = tokens if isinstance(tokens, Tensor) else torch.tensor([row or [0] for row in tokens])
            ids = ids.to(hidden.device)
            level = expand(ids, torch.zeros_like(ids), number)
            return level.logits[:, 0], level.hidden[:, 0]

        return self._chains(level.logits[:, 0], level.hidden[:, 0], step, limits, params, sources)


class HydraBranches(MedusaBranches):
    """Drafts from many places of one text; each head reads the tokens of its own draft."""

    model = "hydra"

    def __init__(self, head: HydraHead, target: CausalLM, depth: int):
        super().__init__(head, target, depth)
        self._net = head.lean(target)

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        stack = self._net.stack
        with as_decoding(self.device):
            self._text = self._net.prefix(stack.chain(features, stack.new_cache(1, len(tokens))))
        self._ids = torch.tensor(tokens, device=self.device)

    def _before(self, starts: Tensor) -> Tensor:
        read = self._text[starts.to(self.device) - self.min_start]  # [S, H]
        self._read = self._net.next_input(read, self._ids[starts.to(self.device) - 1])
        return self._state(0)

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        self._read = self._net.next_input(self._read, tokens.to(self.device))
        return super()._step(starts, level, tokens, hidden)

    def _state(self, level: int) -> Tensor:
        return self._net.hidden(self._read, level)


@dataclass(frozen=True)
class HydraChain(MedusaChain):
    """Hydra heads draft a chain of k tokens a round, at most one a head; 0 takes all heads."""

    uses = ("hydra",)


@dataclass(frozen=True)
class HydraTree(StaticTrees):
    """Hydra heads draft a tree a round, a YAML list of paths of ranks, each node by the tokens of its own path (Ankner
    et al. 2024)."""

    uses = ("hydra",)


METHODS = {"hydra": HydraTree, "hydra-chain": HydraChain}
