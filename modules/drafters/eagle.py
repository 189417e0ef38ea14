"""EAGLE-1 head (Li et al. 2024, "EAGLE"): network, and the part of its loss that EAGLE-3 has not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.settings import EagleSettings, Options, Rope
from draftsmith.modules.drafters.unrolled import UnrolledHead
from draftsmith.modules.layers import DecoderLayer, Layer
from draftsmith.modules.llama_config import MOST_LAYERS, LlamaConfig, LlamaHeadConfig, RopeScaling, layers_of
from draftsmith.modules.rotary import add_rope_table
from draftsmith.modules.types import FeatureBatch, check_range


@dataclass(frozen=True)
class EagleConfig(LlamaHeadConfig):
    """Config of an EAGLE head. fc_bias: bias of the fusion layer, off by default because vLLM drops it silently."""

    fc_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_layers", self.llama.num_layers, 1, MOST_LAYERS)

    @classmethod
    def for_target(
        cls, target: LlamaConfig, num_layers: int = 1, fc_bias: bool = False, rope: Rope = "target"
    ) -> EagleConfig:
        """Return a config with layers like the target's, as far as other systems support them.

        rope: `plain` leaves the target's rope scaling out; the base stays.
        """
        layer = layers_of(
            target,
            num_layers=num_layers,
            sliding_window=None,
            # A head has only what the EAGLE-1 layers of vLLM 0.33.0 and SGLang 0.5.23 (models/llama_eagle.py of both)
            # and of SafeAILab/EAGLE (eagle/model/cnets1.py) all have: no q/k norms, no biases in the MLP (SGLang) or
            # o_proj (SafeAILab), but biases of q, k and v.
            qk_norm=False,
            o_bias=False,
            mlp_bias=False,
        )
        return cls(layer if rope == "target" else dataclasses.replace(layer, rope_scaling=RopeScaling()), fc_bias)


def rope_of(head: LlamaConfig) -> Rope:
    """Return the option that gives a head its rotary positions."""
    scaling = head.rope_scaling
    return "plain" if (scaling.kind, scaling.partial_rotary_factor) == ("default", 1) else "target"


class EagleHead(UnrolledHead[EagleConfig, EagleSettings]):
    """Drafts tokens from the target's state after the final norm, and from its own states behind the text (EAGLE, Li
    et al. 2024). Embedding and lm_head are the target's and not in this directory.

    Network h_t = layers(fc([embed(x_{t+1}); f_t])) ~ f_{t+1}, whose lm_head, the target's, predicts x_{t+2}.

    The embedding comes first; there is no norm before attention in layer 0, and no final norm.
    """

    kind, title = "eagle", "EAGLE head"
    drafts = ("chain", "tree", "static")
    Config, Settings = EagleConfig, EagleSettings
    # The last token has no state behind it to learn, and the one before no token to predict.
    num_lost_rows = 2
    # Its noise is drawn for whole texts.
    takes_spans: ClassVar[bool] = False

    # -- network

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        size = config.llama.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.llama, input_norm=i > 0) for i in range(config.llama.num_layers)
        )
        add_rope_table(self, config.llama, config.max_position)

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        return cast("Sequence[DecoderLayer]", self.layers)

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        return self.fc(torch.cat([embeds, states], -1))

    # -- a new head

    @classmethod
    def new_config(cls, settings: EagleSettings, target: LlamaConfig) -> EagleConfig:
        return EagleConfig.for_target(target, settings.num_layers or 1, rope=settings.rope or "target")

    @classmethod
    def shape(cls, config: EagleConfig) -> Options:
        return {"num_layers": config.llama.num_layers, "rope": rope_of(config.llama)}

    # -- loss

    @classmethod
    def needs_gathered_weights(cls, settings: EagleSettings) -> bool:
        return False

    def training_states(self, states: Tensor, batch: FeatureBatch, settings: EagleSettings, step: TrainStep) -> Tensor:
        # The head learns to draft from its own imprecise features.
        size = settings.noise * step.feature_std
        return states + noise_like(states, step, size, flat=batch.lengths is not None) if size else states

    def combine(
        self, by_tokens: Tensor, hidden: Sequence[Tensor], wanted: Tensor, weights: Tensor, settings: EagleSettings
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the smooth-L1 distance of the states, the mean over H (section 4.2)."""
        wanted = wanted.to(weights.dtype)
        apart = [F.smooth_l1_loss(h.to(wanted.dtype), wanted, reduction="none").mean(-1) for h in hidden]  # [N] each
        by_features = (torch.stack(apart, -1) * weights).sum()
        total = settings.feature_weight * by_features + settings.token_weight * by_tokens
        return total, {"feature_loss": by_features.detach(), "token_loss": by_tokens.detach()}


def noise_like(features: Tensor, step: TrainStep, size: float, flat: bool) -> Tensor:
    """Draw U(-size, size) like `features`, for each sequence by its seed. flat: sequences lie end to end in a row."""
    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    # As many numbers as the sample has tokens without padding: with more, a GPU's generator gives others.
    rows = noise[0].split(list(step.lengths)) if flat else [row[:n] for row, n in zip(noise, step.lengths, strict=True)]
    for seed, row in zip(step.seeds, rows, strict=True):
        generator.manual_seed(seed)
        row.uniform_(-size, size, generator=generator)
    return noise
