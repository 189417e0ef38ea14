"""Bigram head: a trained head in one file, a linear map of the target's state and the next token's embedding.

`draftsmith.add_drafters("docs/examples/drafters")`, or `export DRAFTSMITH_DRAFTERS=docs/examples/drafters`, makes it
known to every command: `train bigram`, decoding, labels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.feature_heads import FeatureHead
from draftsmith.modules.drafters.settings import HeadSettings
from draftsmith.modules.llama_config import LlamaConfig, LlamaHeadConfig
from draftsmith.modules.losses import distances
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput


@dataclass(frozen=True, kw_only=True)
class BigramSettings(HeadSettings):
    """Train a bigram head.

    Attributes:
        scale: Factor of the loss, as an example of an option.
    """

    defaults = {"lr": 1e-2}

    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise InputError("scale", self.scale, "a positive number", "Change it.")


class BigramHead(FeatureHead):
    """Drafts from the target's state and the last token alone: h_t = W [embed(x_{t+1}); f_t]."""

    kind = "bigram"
    drafts = ("chain",)  # the method `bigram`
    Config, Settings = LlamaHeadConfig, BigramSettings
    num_lost_rows = 2

    def __init__(self, config: LlamaHeadConfig):
        super().__init__()
        self.config = config
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return h_t [.., H], in training and in decoding, where it takes the place of the target's state."""
        return self.mix(torch.cat([embeds, states], -1))

    @classmethod
    def new_config(cls, settings: BigramSettings, target: LlamaConfig) -> LlamaHeadConfig:
        return LlamaHeadConfig(dataclasses.replace(target, num_layers=0))

    # Alignment: row t reads token x_{t+1} and state f_t, and predicts x_{t+2} by the target's distribution at f_{t+1}.
    #
    #   row         0     1     2     ...
    #   tokens      x1    x2    x3
    #   states      f0    f1    f2
    #   predicts    x2    x3    x4

    @classmethod
    def counted(cls, batch: FeatureBatch) -> Tensor:
        """Return the rows [B, T - 2] whose predicted token counts and belongs to the same text."""
        same_text = batch.position_ids[:, 2:] == batch.position_ids[:, :-2] + 2
        return same_text & batch.loss_mask[:, 2:]

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Any) -> int:
        return int(cls.counted(batch).sum())

    def loss(self, batch: FeatureBatch, target: CausalLM, settings: Any, step: TrainStep | None) -> LossOutput:
        assert batch.features is not None
        rows = self.counted(batch)
        embeds = target.embed(batch.input_ids[:, 1:-1][rows])  # [N, H]
        dtype = self.mix.weight.dtype
        hidden = self.fuse(embeds.to(dtype), batch.features[:, :-2][rows].to(dtype))  # [N, H]
        wanted, weights = batch.features[:, 1:-1][rows].to(hidden.dtype), torch.ones_like(hidden[:, :1])
        # Its lm_head is the target's, whose whole vocabulary it drafts.
        found = distances(target.lm_head, self.config.vocab_size, wanted, None, None, [hidden], weights)
        sums = {"loss": found.total.detach(), "top1": found.right.sum()}
        count = weights.sum()
        return LossOutput(settings.scale * found.total / count.clamp_min(1), sums, dict.fromkeys(sums, count))


HEADS = (BigramHead,)
