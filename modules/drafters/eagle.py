"""EAGLE-1 head (Li et al. 2024, "EAGLE"): network, alignment and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.attention import Documents, attend_pass
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.feature_heads import FeatureHead
from draftsmith.modules.drafters.settings import EagleSettings, Rope
from draftsmith.modules.layers import (
    MOST_LAYERS,
    DecoderLayer,
    LlamaConfig,
    LlamaHeadConfig,
    RopeScaling,
    add_rope_table,
    layers_of,
)
from draftsmith.modules.losses import LmHead, TokenLoss, soft_cross_entropy
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.transfer import to_device, true_places
from draftsmith.modules.types import FeatureBatch, LossOutput, check_range


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


# Row t pairs tokens up to t + 2, so a sequence has this many rows fewer than tokens.
LOOKAHEAD = 2


# Alignment. Row t reads the embedding of x_{t+1} and the feature f_t, and predicts f_{t+1}, which gives x_{t+2}:
#
#   row                0     1     2     ...   T-3
#   next_ids           x1    x2    x3    ...   x_{T-2}
#   features           f0    f1    f2    ...   f_{T-3}
#   target_features    f1    f2    f3    ...   f_{T-2}
#   predicted          x2    x3    x4    ...   x_{T-1}     loss_mask: which of these are response tokens
@dataclass(frozen=True)
class EagleInputs:
    """A `FeatureBatch` paired for the head, all [B, T-2, ...].

    Of a flat batch [1, N] they are [1, M, ...], two rows less for each of the `documents`; documents of fewer than
    three tokens leave no row.
    """

    next_ids: Tensor
    features: Tensor
    target_features: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    documents: Documents | None = None


def shift(batch: FeatureBatch) -> EagleInputs:
    """Pair tokens and features as SafeAILab's code and servers do; no row pairs tokens of two documents."""
    ids, features, documents = batch.input_ids, batch.features, None
    assert features is not None, "the target reads the batch first"
    if batch.lengths is None:
        count = max(ids.shape[1] - LOOKAHEAD, 0)

        def ahead(offset: int) -> Any:
            return slice(offset, count + offset)

    else:
        sizes = torch.tensor(list(batch.lengths), dtype=torch.int64)
        # Tokens from here to the document's end, this one included.
        left = sizes.cumsum(0).repeat_interleave(sizes) - torch.arange(int(sizes.sum()))  # [N]
        rows = to_device(true_places(left > LOOKAHEAD), ids.device)  # [M]
        documents = Documents.of([n - LOOKAHEAD for n in batch.lengths if n > LOOKAHEAD], ids.device)

        def ahead(offset: int) -> Any:
            return rows + offset

    return EagleInputs(
        next_ids=ids[:, ahead(1)],
        features=features[:, ahead(0)],
        target_features=features[:, ahead(1)],
        loss_mask=batch.loss_mask[:, ahead(2)],
        position_ids=batch.position_ids[:, ahead(0)],
        documents=documents,
    )


def eagle_loss(
    ttt_steps: Sequence[Tensor],
    target_features: Tensor,
    masks: Sequence[Tensor],
    lm_head: LmHead,
    vocab_size: int,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
    decay: float = 1.0,
    step: TrainStep | None = None,
    own_loss: TokenLoss | None = None,
) -> LossOutput:
    """Return EAGLE's loss (section 4.2): feature_weight * smooth-L1(h, f) + token_weight * soft cross-entropy.

    Over several draft steps (`EagleHead.unroll`) it is their weighted mean. Smooth-L1 is the mean over H; the
    cross-entropy is against the target's distribution at temperature 1. Logits are made for the tokens of the masks
    only, a chunk at a time. Sums are those of the first step: the losses, and in a logged step top1 and top3, how often
    the target's argmax is the head's first, or among its first three.

    ttt_steps: hidden states [B, T, H] of each draft step, aligned with target_features [B, T, H].
    masks: [B, T] bool, the tokens that count in each draft step; those of later ones are among those of the first.
    lm_head: frozen, gives logits of vocab_size tokens. decay: weight of a draft step relative to the one before.
    own_loss: in place of the cross-entropy.
    """
    ranked = step is None or step.logged
    chosen = true_places(masks[0], None if step is None else step.logit_rows)  # [N]
    wanted, *predicted = (
        part.flatten(0, 1).index_select(0, chosen) for part in (target_features, *ttt_steps)
    )  # [N, H]
    kept = [mask.flatten().index_select(0, chosen).float() for mask in masks]  # [N] each
    distance = [F.smooth_l1_loss(h.float(), wanted.float(), reduction="none").mean(-1) for h in predicted]
    decays = [decay**i for i in range(len(ttt_steps))]
    weights = [keep * factor for keep, factor in zip(kept, decays, strict=True)]  # [N] each
    features = [(d * weight).sum() for d, weight in zip(distance, weights, strict=True)]
    tokens, first, hits = soft_cross_entropy(lm_head, vocab_size, wanted, predicted, weights, ranked, own_loss)
    # Every draft step's sum is divided by the tokens of the first, so that micro-batches add up exactly.
    number = torch.full((), len(wanted), device=wanted.device)
    total = feature_weight * torch.stack(features).sum() + token_weight * tokens
    sums = {
        "loss": feature_weight * features[0].detach() + token_weight * first,
        "feature_loss": features[0].detach(),
        "token_loss": first,
    }
    if ranked:
        sums |= {"top1": hits[0], "top3": hits[1]}
    return LossOutput(total / sum(decays) / number.clamp_min(1), sums, dict.fromkeys(sums, number))


class EagleHead(FeatureHead):
    """Drafts tokens from the target's state after the final norm, and from its own states behind the text (EAGLE, Li
    et al. 2024). Embedding and lm_head are the target's and not in this directory.

    Network h_t = layers(fc([embed(x_{t+1}); f_t])) ~ f_{t+1}, whose lm_head, the target's, predicts x_{t+2}.

    The embedding comes first; there is no norm before attention in layer 0, and no final norm.
    """

    kind, title = "eagle", "EAGLE head"
    drafts = ("chain", "tree", "static")
    Config, Settings = EagleConfig, EagleSettings
    num_lost_rows = LOOKAHEAD
    ttt_steps = "unroll"

    # -- network

    cos: Tensor
    sin: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        size = config.llama.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.llama, input_norm=i > 0) for i in range(config.llama.num_layers)
        )
        add_rope_table(self, config.llama, config.max_position)

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the layers' input [.., H] of embeddings and states [.., H]."""
        return self.fc(torch.cat([embeds, states], -1))

    def forward(self, embeds: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T, H] of embeds and features [B, T, H]; causal, so right padding needs no mask."""
        return self.unroll(embeds, features, 1, position_ids)[0]

    def unroll(
        self,
        embeds: Tensor,
        features: Tensor,
        num_ttt_steps: int,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> list[Tensor]:
        """Return hidden states [B, T, H] of every row as each of the first `num_ttt_steps` steps of a draft.

        Rows of pass 0 read true features. In pass j row t reads the head's own h_{t-1} of pass j-1 in place of f_t, and
        attends as in a draft that began at row t-j: to rows up to t-j of pass 0, and to one row of each later pass.
        Rows before j mean nothing (HASS, section 3.2; EAGLE-3's training-time test).

        documents: of a flat batch [1, N, H], whose position_ids start at 0 in every document.
        """
        rows = embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(rows, device=embeds.device)[None]
        layers: list[Any] = list(self.layers)
        entries: list[list[Any]] = [[] for _ in layers]
        ttt_steps: list[Tensor] = []
        hidden = features  # [B, T, H]
        embeds = F.pad(embeds, (0, 0, 0, num_ttt_steps - 1))  # [B, T + num_ttt_steps - 1, H]
        for j in range(num_ttt_steps):
            # Here row t is the draft that began there; it reads the token of row t + j, at that row's position.
            at = (position_ids + j).clamp_max(len(self.cos) - 1)
            cos, sin = (table[at][:, None].to(embeds.dtype) for table in (self.cos, self.sin))  # [B, 1, T, D]
            hidden = self.fuse(embeds[:, j : j + rows], hidden)  # [B, T, H]
            for layer, layer_entries in zip(layers, entries, strict=True):
                normed = layer.input_layernorm(hidden)
                hidden = hidden + attend_pass(layer.self_attn, normed, cos, sin, layer_entries, documents)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            ttt_steps.append(F.pad(hidden, (0, 0, j, 0))[:, :rows])  # [B, T, H], row t of the draft at its last token
        return ttt_steps

    # -- a new head

    @classmethod
    def new_config(cls, settings: EagleSettings, target: LlamaConfig) -> EagleConfig:
        return EagleConfig.for_target(target, settings.num_layers or 1, rope=settings.rope or "target")

    @classmethod
    def shape(cls, config: EagleConfig) -> dict[str, Any]:
        return {"num_layers": config.llama.num_layers, "rope": rope_of(config.llama)}

    # -- loss

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Any) -> int:
        """Count the response tokens that rows predict, without `shift`: training counts every batch on the host."""
        if batch.lengths is None:
            return int(batch.loss_mask[:, LOOKAHEAD:].sum())
        sizes = torch.tensor(batch.lengths)
        offsets = torch.arange(LOOKAHEAD)
        # No row predicts a document's first two tokens.
        first = ((sizes.cumsum(0) - sizes)[:, None] + offsets)[offsets < sizes[:, None]]
        return int(batch.loss_mask.sum() - batch.loss_mask[0, first].sum())

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: EagleSettings, step: TrainStep | None
    ) -> LossOutput:
        pairs, num_ttt_steps = shift(batch), 1
        features = pairs.features.to(self.fc.weight.dtype)  # [B, T-2, H]
        if step is not None:
            num_ttt_steps = settings.num_ttt_steps(step)
            # The head learns to draft from its own imprecise features.
            if size := settings.noise * step.feature_std:
                features = features + noise_like(features, step, size, flat=batch.lengths is not None)
        embeds = target.embed(pairs.next_ids).to(features.dtype)  # [B, T-2, H]
        return eagle_loss(
            self.unroll(embeds, features, num_ttt_steps, pairs.position_ids, pairs.documents),
            pairs.target_features,
            # No draft reaches a later step at a document's first rows.
            [pairs.loss_mask & (pairs.position_ids >= number) for number in range(num_ttt_steps)],
            lambda hidden: target.lm_head(hidden.to(target.dtype)),
            self.config.vocab_size,
            settings.feature_weight,
            settings.token_weight,
            settings.unroll_decay,
            step,
            cast("TokenLoss | None", settings.loss),
        )

    @classmethod
    def flops(cls, config: EagleConfig, settings: EagleSettings, step: TrainStep, logit_rows: int) -> float:
        rows = [max(length - LOOKAHEAD, 0) for length in step.lengths]
        return eagle_training(config.llama, rows, logit_rows, settings.num_ttt_steps(step))


def noise_like(features: Tensor, step: TrainStep, size: float, flat: bool) -> Tensor:
    """Draw U(-size, size) like `features`, for each sequence by its seed. flat: sequences lie end to end in a row."""
    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    # As many numbers as the sample has rows without padding: with more, a GPU's generator gives others.
    sizes = [max(0, length - LOOKAHEAD) for length in step.lengths]
    rows = noise[0].split(sizes) if flat else [row[:count] for row, count in zip(noise, sizes, strict=True)]
    for seed, row in zip(step.seeds, rows, strict=True):
        generator.manual_seed(seed)
        row.uniform_(-size, size, generator=generator)
    return noise


def eagle_training(config: LlamaConfig, rows: Sequence[int], logit_rows: int, ttt_steps: int = 1) -> float:
    """Return the FLOPs of forward and backward of an EAGLE head with these layers, and of its loss.

    rows: of each document. logit_rows: rows whose logits are made, the target's once and the head's in every pass.
    Later passes cost what the first does, because each query has as many keys.
    """
    fusion = flops.linear(2 * config.hidden_size, config.hidden_size, sum(rows))
    head = ttt_steps * flops.TRAINED * (fusion + flops.layers_forward(config, rows))
    # The first pass reads data, so no gradient flows to the inputs of its fusion layer.
    head -= (flops.TRAINED - flops.TRAINED_FIRST) * fusion
    return head + (1 + ttt_steps * flops.FROZEN_PASSING) * flops.lm_head_forward(config, logit_rows)
