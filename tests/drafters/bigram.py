"""Bigram head: a linear map of the target's state and the last token's embedding (for a test)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.decoding.branches import BranchDrafter
from draftsmith.modules.drafters.base import DraftHead, TargetWeights, TrainingCost, TrainStep
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.losses import soft_cross_entropy
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput


@dataclass(frozen=True)
class BigramConfig:
    """Sizes of a bigram head."""

    hidden_size: int
    vocab_size: int
    max_position: int


@dataclass(frozen=True, kw_only=True)
class BigramSettings:
    """Train a bigram head.

    Attributes:
        scale: Size of the weights that it starts with.
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise InputError("scale", self.scale, "a positive number", "Change it.")


class BigramHead(DraftHead, TrainingCost):
    """h_t = W [embed(x_{t+1}); f_t] is to give x_{t+2} by the target's own lm_head."""

    kind = "bigram"
    Config, Settings = BigramConfig, BigramSettings
    defaults = {"lr": 1e-2}
    starts = ("random", "zero")
    lookahead = 2

    def __init__(self, config: BigramConfig):
        super().__init__()
        self.config = config
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    @classmethod
    def new_config(cls, settings: BigramSettings, target: LlamaConfig) -> BigramConfig:
        return BigramConfig(target.hidden_size, target.vocab_size, target.max_position)

    def start(self, name: str, weights: TargetWeights) -> None:
        assert weights.lm_head().shape == (self.config.vocab_size, self.config.hidden_size)
        self.mix.weight.data.zero_()

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Any) -> int:
        return int(cls._rows(batch)[1].sum())

    @classmethod
    def _rows(cls, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        """Which tokens t have t + 2 in the same text, [B, T - 2], and of these those that count."""
        same = batch.position_ids[:, 2:] == batch.position_ids[:, :-2] + 2
        return same, same & batch.loss_mask[:, 2:]

    def forward(self, embeds: Tensor, features: Tensor) -> Tensor:
        return self.mix(torch.cat([embeds, features.to(embeds.dtype)], -1))

    def loss(self, batch: FeatureBatch, target: CausalLM, settings: Any, step: TrainStep | None) -> LossOutput:
        assert batch.features is not None
        counted = self._rows(batch)[1]
        embeds = target.embed(batch.input_ids[:, 1:-1]).to(self.mix.weight.dtype)
        hidden = self(embeds, batch.features[:, :-2])[counted]
        ones = torch.ones(len(hidden), device=hidden.device)
        totals, hits = soft_cross_entropy(target.lm_head, batch.features[:, 1:-1][counted], [ones], [hidden])
        sums = {"loss": totals[0].detach(), "top1": hits[0]}
        return LossOutput(totals[0] / ones.sum().clamp_min(1), sums, dict.fromkeys(sums, ones.sum()))

    @classmethod
    def flops(cls, config: BigramConfig, settings: Any, step: TrainStep, logit_rows: int) -> float:
        mixed = flops.linear(2 * config.hidden_size, config.hidden_size, sum(step.lengths))
        return 2 * mixed + 3 * flops.linear(config.hidden_size, config.vocab_size, logit_rows)

    def drafter(self, target: CausalLM, stops: Any, capacity: int) -> Any:
        raise NotImplementedError("the test does not decode")

    def branches(self, target: CausalLM, depth: int) -> BranchDrafter:
        return BigramBranches(self, target, depth)


class BigramBranches(BranchDrafter):
    """Drafts of a bigram head: its own states take the place of the target's behind the text."""

    min_start, model = 2, "bigram"

    def __init__(self, head: BigramHead, target: CausalLM, depth: int):
        super().__init__(target, depth)
        self._head = head
        self._states = torch.empty(0)

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        self._states = self._head(self.embed(torch.tensor(tokens[1:])), features[:-1])

    def _before(self, starts: Tensor) -> Tensor:
        return self._states[starts - 2]

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return self._head(self.embed(tokens), hidden)

    def _drop(self) -> None:
        """Nothing is kept."""
