"""Hydra heads (Ankner et al. 2024): Medusa's made sequential, each reads the tokens drafted before its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.acceptance.head import ResidualBlock
from draftsmith.modules.attention import Documents, attend_text
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.engine.lean import Captured, LeanStack
from draftsmith.modules.engine.rows import cached_rows, select_outputs
from draftsmith.modules.layers import DecoderLayer, RMSNorm
from draftsmith.modules.llama_config import LlamaConfig, LlamaHeadConfig
from draftsmith.modules.rotary import add_rope_table
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, check_config

from .medusa import MOST_BLOCKS, MedusaHead, MedusaNet, MedusaSettings, lm_head_passes


@dataclass(frozen=True)
class HydraConfig(LlamaHeadConfig):
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

    defaults = {"epochs": 10, "lr": 5e-4}

    loss: Literal["hard", "soft"] = "soft"
    prefix_attention: bool | None = None


class HydraHead(MedusaHead):
    """Guesses each of the next tokens from the target's last state and the tokens drafted before it, by a head for each
    (Hydra, Ankner et al. 2024). They have an lm_head each, or read the target's; embeddings are the target's."""

    kind, title = "hydra", "Hydra heads"
    drafts = ("chain", "static")
    Config, Settings = HydraConfig, HydraSettings
    lm_head_bias = True

    cos: Tensor
    sin: Tensor

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        llama = config.llama
        self.layers = nn.ModuleList(DecoderLayer(llama) for _ in range(llama.num_layers))
        self.norm = RMSNorm(llama.hidden_size, llama.rms_eps) if config.prefix_attention else None
        add_rope_table(self, llama, llama.max_position)

    @classmethod
    def make_head(cls, config: HydraConfig, number: int) -> nn.Module:
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
            states, positions = documents.pad(states), documents.pad(positions)  # [D, L, H], [D, L]
        cos, sin = (table[positions][:, :, None].to(states.dtype) for table in (self.cos, self.sin))  # [B, T, 1, D]
        for layer in self.layers:
            states = layer(states, cos, sin, attend_text)
        return self.norm(states if documents is None else documents.unpad(states))

    def inputs(self, number: int, states: Tensor, counted: Tensor, batch: FeatureBatch, target: CausalLM) -> Tensor:
        """Return state t and the embeddings of tokens t + 1 to t + 1 + number side by side, [N, (2 + number) H]."""
        end = counted.shape[1]
        tokens = [target.embed(batch.input_ids[:, 1 + i : 1 + i + end][counted]) for i in range(1 + number)]
        return torch.cat([states[:, :end][counted], *(embeds.to(states.dtype) for embeds in tokens)], -1)

    def flops(self, settings: Any, step: TrainStep, logit_rows: int) -> float:
        config = self.config
        size, first = config.hidden_size, flops.TRAINED if config.prefix_attention else flops.TRAINED_FIRST
        parts = sum(2 + i for i in range(config.num_heads))
        reading = first * flops.linear(parts * size, 2 * size, logit_rows)
        blocks = flops.TRAINED * config.num_heads * (config.num_layers - 1) * flops.linear(size, size, logit_rows)
        logits = lm_head_passes(config, settings) * flops.linear(size, config.vocab_size, logit_rows)
        layers = flops.TRAINED * flops.layers_forward(config.llama, step.lengths)
        return reading + blocks + config.num_heads * logits + layers

    # -- drafter

    def net(self, target: CausalLM) -> DraftNet:
        return HydraNet(self, target)


class PrefixNetwork:
    """The prefix attention over the target's states (`engine.rows.Network`). Without it, it has no layers."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, head: HydraHead, target: CausalLM):
        layers: Any = head.layers
        self._norm = head.norm
        self.stack = LeanStack(list(layers), head.config.llama, target.dtype, target.device)

    def inputs(self, states: Tensor) -> Tensor:
        return states

    def outputs(self, hidden: Tensor, keep: Tensor | slice | None, captured: Captured | None) -> tuple[Tensor, Tensor]:
        """Return the states of the outputs to keep, twice: logits come from the heads."""
        hidden = select_outputs(hidden, keep)
        states = hidden if self._norm is None else self._norm(hidden)
        return states, states


class HydraNet(MedusaNet):
    """Drafts each level with one call of its head, for nodes that read the tokens of their own path.

    A node's input is the target's last state, through the prefix attention, and the embeddings of the last emitted
    token and of the tokens drafted on its path.
    """

    one_pass = False

    def __init__(self, head: HydraHead, target: CausalLM):
        super().__init__(head, target)
        lean: Any = self.head
        self._network = PrefixNetwork(lean, target)
        self._max_position = head.config.max_position

    def allocate(self, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        most = min(capacity, self._max_position)
        self.longest_text = most + 2
        self._cache = cached_rows(self._network, 1, most, static)

    def begin(self) -> None:
        self._cache.reset(1)

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        states, _ = self._cache.extend([features])  # [1, 1, H]
        self._inputs = self._next(states[0], torch.tensor(tokens[-1:], device=self.device))
        return self._level(0)

    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        self._descend(tokens, parents)
        return self._level(depth)

    def _level(self, depth: int) -> Level:
        hidden = self.heads[depth](self._inputs)
        return Level(hidden, self.lm_heads[depth](hidden))

    def _descend(self, tokens: Sequence[int] | Tensor, parents: Tensor | None) -> None:
        inputs = self._inputs if parents is None else self._inputs[parents]
        self._inputs = self._next(inputs, self.ids(tokens))  # [n, R]

    def _next(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """Append the embeddings of ids [..] to a head's inputs [.., R]: the inputs of the next head."""
        return torch.cat([inputs, self.embed(ids)], -1)

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        assert features is not None and len(features) == len(tokens)
        stack = self._network.stack
        self._text, _ = self._network.outputs(stack.chain(features, stack.new_cache(1, len(tokens))), None, None)
        self._ids = torch.tensor(tokens, device=self.device)

    def branch(self, starts: Tensor) -> Tensor:
        starts = starts.to(self.device)
        states, ids = self._text[starts - self.first_start], self._ids[starts - 1]
        self._inputs = self._next(states, ids)
        return self.state(self.heads[0](self._inputs), 0)

    def read(self, tokens: Tensor, depth: int) -> Tensor:
        self.check_depth(depth)
        self._descend(tokens, None)
        return self.state(self.heads[depth](self._inputs), depth)


HEADS = (HydraHead,)
