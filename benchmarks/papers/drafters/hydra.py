"""Hydra heads (Ankner et al. 2024): Medusa's made sequential, each reads the tokens drafted before its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch

from .medusa import MedusaHead, MedusaNet, MedusaSettings


class GroundedMLP(nn.Module):
    """Network of a head: S x + c + SiLU(W x + b) of a state and some embeddings side by side.

    New weights pass the state through.
    """

    def __init__(self, size: int, parts: int):
        """parts: number of states and embeddings, each of this size."""
        super().__init__()
        self.linear, self.skip = nn.Linear(parts * size, size), nn.Linear(parts * size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.skip.bias)
        nn.init.eye_(self.skip.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + F.silu(self.linear(x))  # [.., parts * H] -> [.., H]


@dataclass(frozen=True, kw_only=True)
class HydraSettings(MedusaSettings):
    """Train Hydra heads. The target stays as it is."""

    defaults = {"epochs": 10, "lr": 5e-4}

    loss: Literal["hard", "soft"] = "soft"


class HydraHead(MedusaHead):
    """Guesses each of the next tokens from the target's last state and the tokens drafted before it, by a head for each
    (Hydra, Ankner et al. 2024). They have an lm_head each, or read the target's; embeddings are the target's."""

    kind, title = "hydra", "Hydra heads"
    drafts = ("chain", "static")
    Settings: ClassVar[type] = HydraSettings
    default_heads = 4
    lm_head_bias = True

    @classmethod
    def make_head(cls, config: Any, number: int) -> nn.Module:
        return GroundedMLP(config.hidden_size, 2 + number)

    # -- loss

    def inputs(self, number: int, states: Tensor, counted: Tensor, batch: FeatureBatch, target: CausalLM) -> Tensor:
        """Return state t and the embeddings of tokens t + 1 to t + 1 + number side by side, [N, (2 + number) H]."""
        end = counted.shape[1]
        tokens = [target.embed(batch.input_ids[:, 1 + i : 1 + i + end][counted]) for i in range(1 + number)]
        return torch.cat([states[:, :end][counted], *(embeds.to(states.dtype) for embeds in tokens)], -1)

    # -- drafter

    def net(self, target: CausalLM) -> DraftNet:
        return HydraNet(self, target)


class HydraNet(MedusaNet):
    """Drafts each level with one call of its head, for nodes that read the tokens of their own path.

    A node's input is the target's last state, and the embeddings of the last emitted token and of the tokens drafted on
    its path.
    """

    one_pass = False

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        self._inputs = self._next(features[-1:], torch.tensor(tokens[-1:], device=self.device))
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
        super().open(tokens, features, depth)
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
