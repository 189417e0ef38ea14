"""The EAGLE-1 head (Li et al. 2024, "EAGLE"): how features and tokens are paired, what it learns, and how it drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules import flops
from draftsmith.modules.drafters.base import HeadCard, TargetWeights, TrainStep
from draftsmith.modules.drafters.chains import FixedK
from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet, LeanEagle, Rope
from draftsmith.modules.drafters.feature_heads import FeatureHead
from draftsmith.modules.drafters.trees import DynamicTrees, StaticTrees
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.losses import LmHead, soft_cross_entropy
from draftsmith.modules.packing import Documents
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.transfer import to_device, true_places
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput

# Row t pairs tokens up to t + 2: so many rows fewer than tokens.
LOOKAHEAD = 2
# Logits held at once where only the best token is asked for: 256 MB in bf16 for a vocabulary of 128k.
CHOICE_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class EagleSettings:
    """Train an EAGLE head. The defaults are the paper's, for 7B targets; small targets want a higher lr and more weight
    on tokens (configs/train/eagle-small.yaml).

    Attributes:
        num_layers: Decoder layers of the head. Default: 1, or those of the head it starts from.
        rope: Rotary positions of the head: the target's, or plain, without the target's scaling: SafeAILab's code knows
            none but linear and dynamic. vLLM and SGLang hold both.
        init: random; target-last-layer, where the head's last layer starts as the target's last one; or the directory
            of a head to fine-tune, ours or an imported one, whose shape it keeps. Only its width and vocabulary have to
            be this target's: a head of the model before its own fine-tuning, merging or quantising is a good start. At
            random learns faster than target-last-layer on the embedded target: top-1 of 0.22 after 42 steps to 0.02.
        feature_weight: Loss weight of the smooth-L1 distance between features.
        token_weight: Loss weight of the soft cross-entropy against the target's distribution.
        noise: Features are read with uniform noise up to this share of their standard deviation.
        unroll: Draft steps to train on: each batch is also read as the second, third, ... step of a draft, on the
            head's own features (HASS; EAGLE-3's training-time test). 1 is EAGLE-1; more costs as many passes and keeps
            later tokens of a chain good.
        unroll_after: Share of the steps after which this begins.
        unroll_decay: Loss weight of a draft step, relative to the one before.
        agreement_steps: Draft steps whose agreement with the target is measured at validations, each where the steps
            before it were right; 0 measures none.
    """

    num_layers: int | None = None
    rope: Rope = "target"
    init: str = "random"
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    unroll: int = 1
    unroll_after: float = 0.0
    unroll_decay: float = 1.0
    agreement_steps: int = dataclasses.field(default=3, metadata={"volatile": True})

    def __post_init__(self) -> None:
        if self.feature_weight < 0 or self.token_weight < 0 or self.feature_weight + self.token_weight == 0:
            found = f"{self.feature_weight}, {self.token_weight}"
            raise InputError("feature_weight, token_weight", found, "not negative, not both 0", "Change them.")
        if not 0 <= self.unroll_after < 1:
            raise InputError("unroll_after", self.unroll_after, "a share in [0, 1)", "Change it.")
        if not 0 < self.unroll_decay <= 1:
            raise InputError("unroll_decay", self.unroll_decay, "a weight in (0, 1]", "Change it.")
        if not self.noise >= 0:
            raise InputError("noise", self.noise, "0 or more", "Change it.")
        for name, least in {"num_layers": 1, "agreement_steps": 0, "unroll": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(name, value, f"{least} or more", "Change it.")

    def num_passes(self, step: TrainStep) -> int:
        """Draft steps that this step trains on."""
        return self.unroll if self.unroll > 1 and step.number >= round(self.unroll_after * step.total) else 1


@dataclass(frozen=True)
class EagleInputs:
    """A `FeatureBatch` paired for the head: row t has x_{t+1} and f_t, and is to predict f_{t+1}, which gives x_{t+2}.

    All are [B, T-2, ...]; `loss_mask` is true where x_{t+2} is a response token. Of a flat batch [1, N] they are
    [1, M, ...], two rows less for each of the `documents`, of which those of fewer than three tokens leave nothing.
    """

    next_ids: Tensor
    features: Tensor
    target_features: Tensor
    predicted_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    documents: Documents | None = None

    def mask_of_step(self, step: int) -> Tensor:
        """The tokens that count in a draft's step 0, 1, ...: no draft that began inside the sequence reaches a later
        one at its first rows."""
        return self.loss_mask & (self.position_ids >= step)


def shift(batch: FeatureBatch) -> EagleInputs:
    """The one place where the pairing is made. Token x_{t+1} sits at position t, as in SafeAILab's code and servers. Of
    documents laid end to end no row pairs tokens of two."""
    ids, features, documents = batch.input_ids, batch.features, None
    assert features is not None, "the target reads the batch first"
    if batch.lengths is None:
        count = max(ids.shape[1] - LOOKAHEAD, 0)

        def at(ahead: int) -> Any:  # the rows' tokens so far ahead
            return slice(ahead, count + ahead)

    else:
        sizes = torch.tensor(list(batch.lengths), dtype=torch.int64)
        # Tokens from here to the document's end, this one too.
        left = sizes.cumsum(0).repeat_interleave(sizes) - torch.arange(int(sizes.sum()))
        rows = to_device(true_places(left > LOOKAHEAD), ids.device)
        documents = Documents.of([n - LOOKAHEAD for n in batch.lengths if n > LOOKAHEAD], ids.device)

        def at(ahead: int) -> Any:
            return rows + ahead

    return EagleInputs(
        next_ids=ids[:, at(1)],
        features=features[:, at(0)],
        target_features=features[:, at(1)],
        predicted_ids=ids[:, at(2)],
        loss_mask=batch.loss_mask[:, at(2)],
        position_ids=batch.position_ids[:, at(0)],
        documents=documents,
    )


def eagle_loss(
    passes: Sequence[Tensor],
    target_features: Tensor,
    masks: Sequence[Tensor],
    lm_head: LmHead,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
    decay: float = 1.0,
    step: TrainStep | None = None,
) -> LossOutput:
    """EAGLE's loss (section 4.2): feature_weight * smooth-L1(h, f) + token_weight * soft cross-entropy; of the first,
    second, ... step of a draft (`EagleNet.unroll`) their weighted mean.

    passes: hidden states [B, T, H] of each step, aligned with target_features [B, T, H] (h_t with the feature it
        predicts).
    masks: [B, T] bool, the tokens that count in each step; those of later steps are among those of the first.
    decay: weight of a step relative to the one before. step: of a training: what it knows of the batch, and whether its
        numbers are logged.

    Smooth-L1 is the mean over H, the cross-entropy is against the target's distribution at temperature 1. Every step's
    sum is divided by the tokens of the first, so that the loss of a batch is exact in whatever parts it is computed.
    lm_head is frozen; logits are made for the tokens of the masks only, some at a time. The sums are those of the first
    step; beside the losses of a logged step top1 and top3: how often the target's argmax is the head's first or
    among its three first.
    """
    ranked = step is None or step.logged
    chosen = true_places(masks[0], None if step is None else step.chosen)
    wanted, *predicted = (part.flatten(0, 1).index_select(0, chosen) for part in (target_features, *passes))
    kept = [mask.flatten().index_select(0, chosen).float() for mask in masks]
    distance = [F.smooth_l1_loss(h.float(), wanted.float(), reduction="none").mean(-1) for h in predicted]
    feature_totals = torch.stack([(d * keep).sum() for d, keep in zip(distance, kept, strict=True)])
    token_totals, hits = soft_cross_entropy(lm_head, wanted, kept, predicted, ranked)
    weights = to_device(torch.tensor([decay**i for i in range(len(passes))]), wanted.device)
    totals = feature_weight * feature_totals + token_weight * token_totals
    number = torch.full((), len(wanted), device=wanted.device)
    sums = {
        "loss": totals[0].detach(),
        "feature_loss": feature_totals[0].detach(),
        "token_loss": token_totals[0].detach(),
    }
    if ranked:
        sums |= {"top1": hits[0], "top3": hits[1]}
    loss = (weights * totals).sum() / weights.sum() / number.clamp_min(1)
    return LossOutput(loss, sums, dict.fromkeys(sums, number))


class EagleHead(EagleNet, FeatureHead):
    """EAGLE-1: it reads the target's state after the final norm, and its own state in the place of the next one."""

    kind = "eagle"
    Config, Settings = EagleConfig, EagleSettings
    # The paper's, for 7B targets.
    defaults: ClassVar[dict[str, Any]] = {"epochs": 10, "lr": 3e-5, "betas": (0.9, 0.95), "clip": 0.5}
    starts = ("random", "target-last-layer")
    lookahead = LOOKAHEAD
    passes = "unroll"

    @classmethod
    def card(cls, head: Mapping[str, Any]) -> HeadCard:
        what = "Drafts tokens from the target's own features (EAGLE, Li et al. 2024). "
        what += "Embedding and lm_head are the target's and not in this directory."
        shape: tuple[str, ...] = ()
        if llama := head.get("llama"):
            layers = f"{llama['num_layers']} decoder layer(s) of width {llama['hidden_size']}"
            heads = f"{llama['num_heads']} heads of {llama['head_dim']} ({llama['num_kv_heads']} of keys and values)"
            sizes = f"MLP of {llama['intermediate_size']}, vocabulary of {llama['vocab_size']}"
            rope = f"rotary base {llama['rope_theta']:g}, scaling {llama['rope_scaling']['kind']}"
            shape = (f"- {layers}: {heads}, {sizes}; {rope}",)
        return HeadCard("EAGLE head", what, ("eagle",), "eagle:k=5", shape)

    # -- training

    @classmethod
    def shape(cls, settings: EagleSettings, target: LlamaConfig) -> EagleConfig:
        return EagleConfig.for_target(target, settings.num_layers or 1, rope=settings.rope)

    @classmethod
    def check_start(cls, settings: EagleSettings, config: EagleConfig) -> None:
        layers, scaling = config.llama.num_layers, config.llama.rope_scaling.kind
        another = "or start from another head."
        if settings.num_layers not in (None, layers):
            expected = f"{layers}, as the head of --init has"
            raise InputError("num_layers", settings.num_layers, expected, f"Leave --num-layers out, {another}")
        if settings.rope == "plain" and scaling != "default":
            expected = f"target: the head of --init has rope scaling {scaling}"
            raise InputError("rope", "plain", expected, f"Leave --rope out, {another}")

    def start(self, name: str, weights: TargetWeights) -> None:
        if name == "target-last-layer":
            self.init_from_target(weights.last_layer())

    @classmethod
    def num_loss_tokens(cls, batch: FeatureBatch) -> int:
        """Of `shift`, by the mask alone: a training counts every batch on the host. No row predicts a document's first
        tokens."""
        if batch.lengths is None:
            return int(batch.loss_mask[:, LOOKAHEAD:].sum())
        sizes = torch.tensor(batch.lengths)
        ahead = torch.arange(LOOKAHEAD)
        first = ((sizes.cumsum(0) - sizes)[:, None] + ahead)[ahead < sizes[:, None]]
        return int(batch.loss_mask.sum() - batch.loss_mask[0, first].sum())

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: EagleSettings, step: TrainStep | None
    ) -> LossOutput:
        """The loss. In training features are read with U(-noise, noise) * feature_std added, so that the head learns to
        draft on its own imprecise ones."""
        pair, passes = shift(batch), 1
        features = pair.features.to(self.fc.weight.dtype)
        if step is not None:
            passes = settings.num_passes(step)
            if size := settings.noise * step.feature_std:
                features = features + noise_like(features, step, size, flat=batch.lengths is not None)
        return eagle_loss(
            self._unrolled(pair, target, features, passes),
            pair.target_features,
            [pair.mask_of_step(number) for number in range(passes)],
            lambda hidden: target.lm_head(hidden.to(target.dtype)),
            settings.feature_weight,
            settings.token_weight,
            settings.unroll_decay,
            step,
        )

    def _unrolled(self, pair: EagleInputs, target: CausalLM, features: Tensor, passes: int) -> list[Tensor]:
        embeds = target.embed(pair.next_ids).to(features.dtype)
        return self.unroll(embeds, features, passes, pair.position_ids, pair.documents)

    def validation(self, batch: FeatureBatch, target: CausalLM, settings: EagleSettings) -> LossOutput:
        """The metrics of validation, with `agreement`."""
        output = self.loss(batch, target, settings, None)
        if not settings.agreement_steps:
            return output
        sums, counts = self.agreement(batch, target, settings.agreement_steps)
        return LossOutput(output.loss, output.sums | sums, output.counts | counts)

    def agreement(
        self, batch: FeatureBatch, target: CausalLM, steps: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums and counts of agreement_1, agreement_2, ...: how often a draft's first, second, ... token is the
        target's choice, of the drafts whose tokens before were all right.

        A draft begins at every response row, and from its second step on it reads the head's own features and tokens.
        The tokens that it reads are those of the data, so it is followed only as long as it chose them: on text that
        the target wrote greedily the numbers are those of greedy drafting.
        """
        pair = shift(batch)
        dtype = self.fc.weight.dtype
        passes = self._unrolled(pair, target, pair.features.to(dtype), steps)
        wanted = choices(target, pair.target_features.to(dtype), pair.loss_mask)
        # The next row goes on with the same document, and with a response in it.
        follows = pair.loss_mask[:, 1:] & (pair.position_ids[:, 1:] == pair.position_ids[:, :-1] + 1)
        drafted = pair.loss_mask.clone()  # rows that step j of a draft, begun j rows before, has reached
        sums, counts = {}, {}
        for j, hidden in enumerate(passes, start=1):
            chosen = choices(target, hidden, drafted)
            right = drafted & (chosen == wanted)
            sums[f"agreement_{j}"], counts[f"agreement_{j}"] = right.sum(), drafted.sum()
            drafted = torch.zeros_like(drafted)
            drafted[:, 1:] = (right & (chosen == pair.predicted_ids))[:, :-1] & follows
        return sums, counts

    @classmethod
    def flops(cls, config: EagleConfig, settings: EagleSettings, step: TrainStep, loss_tokens: int) -> float:
        rows = [max(length - LOOKAHEAD, 0) for length in step.lengths]
        return eagle_training(config.llama, rows, loss_tokens, settings.num_passes(step))

    # -- decoding

    def lean(self, target: CausalLM) -> LeanEagle:
        return LeanEagle(self, target, self.precision, self.output)


def fusion_forward(config: LlamaConfig, rows: int) -> float:
    """The EAGLE head's layer that joins embedding and feature."""
    return flops.linear(2 * config.hidden_size, config.hidden_size, rows)


def eagle_forward(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """One pass of an EAGLE head whose layers are `config`'s; lengths: rows of each document, which are its tokens less
    2 in training (`shift`). A later pass of `EagleHead.unroll` costs the same: as many keys a query."""
    return fusion_forward(config, sum(lengths)) + flops.layers_forward(config, lengths)


def eagle_training(config: LlamaConfig, lengths: Sequence[int], loss_tokens: int, passes: int = 1) -> float:
    """Forward and backward of an EAGLE head and its loss, from features that are there.

    lengths: rows of each document as in `eagle_forward`. loss_tokens: rows whose logits are made; the target's once,
    the head's in each of the unrolled `passes`.
    """
    rows = sum(lengths)
    head = passes * flops.TRAINED * eagle_forward(config, lengths)
    head -= (flops.TRAINED - flops.TRAINED_FIRST) * fusion_forward(config, rows)  # the first pass reads data only
    return head + (1 + passes * flops.FROZEN_PASSING) * flops.lm_head_forward(config, loss_tokens)


def noise_like(features: Tensor, step: TrainStep, size: float, flat: bool) -> Tensor:
    """U(-size, size) like `features`, of each sequence by its seed. flat: they are laid end to end in one row."""
    made = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    # As many numbers as the sample has rows, padding aside: a device's generator gives other ones otherwise.
    sizes = [max(0, length - LOOKAHEAD) for length in step.lengths]
    rows = made[0].split(sizes) if flat else [row[:own] for row, own in zip(made, sizes, strict=True)]
    for seed, row in zip(step.seeds, rows, strict=True):
        generator.manual_seed(seed)
        row.uniform_(-size, size, generator=generator)
    return made


def choices(target: CausalLM, hidden: Tensor, rows: Tensor) -> Tensor:
    """Token ids [B, T] that `hidden` [B, T, H] gives greedily at `rows` [B, T] (bool), and -1 elsewhere. Logits are
    made for CHOICE_ROWS rows at a time."""
    found = torch.full(rows.shape, -1, device=rows.device)
    chosen = [target.lm_head(some.to(target.dtype)).argmax(-1) for some in hidden[rows].split(CHOICE_ROWS)]
    found[rows] = torch.cat(chosen) if chosen else found[rows]
    return found


@dataclass(frozen=True)
class EagleChain(FixedK):
    """An EAGLE head drafts a chain of k tokens a round (Li et al. 2024)."""

    uses = ("eagle",)


@dataclass(frozen=True)
class EagleStaticTree(StaticTrees):
    """EAGLE-1's static tree (Li et al. 2024): 25 nodes, or any tree from a YAML list of paths of ranks."""

    uses = ("eagle",)


@dataclass(frozen=True)
class Eagle2(DynamicTrees):
    """EAGLE-2's dynamic trees (Li et al. 2024) of an EAGLE head."""

    uses = ("eagle",)


METHODS = {"eagle": EagleChain, "eagle-tree": EagleStaticTree, "eagle2": Eagle2}
