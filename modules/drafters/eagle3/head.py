"""The EAGLE-3 head (Li et al. 2025): which token stands beside which state, what it learns, and how it drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules import flops
from draftsmith.modules.drafters.base import HeadCard, TargetWeights, TrainStep
from draftsmith.modules.drafters.chains import FixedK
from draftsmith.modules.drafters.eagle.net import Rope
from draftsmith.modules.drafters.eagle3.loss import Distances, Kind, Objective, distances
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, Eagle3Net, LeanEagle3, default_layers, layer_like
from draftsmith.modules.drafters.feature_heads import FeatureHead
from draftsmith.modules.drafters.trees import DynamicTrees, StaticTrees
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.packing import documents_of
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.transfer import to_device, true_places
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput, at_least

Mask = Literal["input", "previous", "predicted"]
Normalizer = Literal["sequence", "tokens", "padded"]


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings:
    """Train an EAGLE-3 head. Where the published trainers differ, each of their ways is a value here:
    configs/recipes/ has them by name.

    Attributes:
        layers: Layers of the target whose inputs it reads, distinct ones, ascending. Default: 2, L/2 and L-3, or those
            of the head it starts from. Of other than three, vLLM, SGLang and speculators can serve the head.
        draft_vocab: Tokens that it can draft: the most frequent ones of the answers that it is trained on, and those
            that end them. 0, or no less than the target has: all.
        rope: Rotary positions of the head: the target's, or plain, without the target's scaling.
        rope_theta: Rotary base of the head. Default: the target's.
        version: 3.1: every state is normed before they are joined, and so is what the head reads of itself; or 3, as in
            the paper. vLLM, SGLang and speculators serve both, SafeAILab's code 3 only.
        init: random; target-last-layer, where its layer starts as the target's last one; or the directory of a head to
            fine-tune, whose shape it keeps.
        train_lm_head: Train the lm_head too, which begins as the target's. That of a head to fine-tune is the new
            target's where it was never trained, and else the head's own.
        passes: Tokens of the drafts that it is trained on, each read behind its own states (training-time test).
        passes_after: Share of the steps after which there is more than one.
        pass_decay: Loss weight of a pass, relative to the one before.
        pass_weights: mean divides by the sum of the passes' weights, so that the learning rate does not depend on their
            number; sum does not.
        token_mask: Which tokens count: those whose input is of an answer, which is what drafting meets; previous takes
            the mask one token earlier (SafeAILab, SpecForge), predicted one later.
        normalizer: The loss is a mean over sequences, each of its own tokens' mean; over tokens; or over all tokens,
            those that do not count and padding too.
        unknown: Tokens where the target's first choice cannot be drafted: drop them from the loss, or keep them.
        loss: ce, soft cross-entropy; lk, -log of the acceptance; lk-hybrid, from one to the other as acceptance grows
            (arXiv 2602.23881).
        lk_eta: Of lk-hybrid, how early acceptance takes over.
        lk_over: Of lk-hybrid, whether each token's acceptance says how far, or their mean.
    """

    layers: tuple[int, ...] = ()
    draft_vocab: int = 32_000
    rope: Rope = "target"
    rope_theta: float | None = None
    version: Literal["3", "3.1"] = "3.1"
    init: str = "random"
    train_lm_head: bool = False
    passes: int = 7
    passes_after: float = 0.0
    pass_decay: float = 0.8
    pass_weights: Literal["mean", "sum"] = "mean"
    token_mask: Mask = "input"
    normalizer: Normalizer = "sequence"
    unknown: Literal["drop", "keep"] = "drop"
    loss: Kind = "ce"
    lk_eta: float = 3.0
    lk_over: Literal["token", "batch"] = "token"

    def __post_init__(self) -> None:
        at_least("passes", self.passes, 1)
        at_least("draft_vocab", self.draft_vocab, 0)
        if not 0 <= self.passes_after < 1:
            raise InputError("passes_after", self.passes_after, "a share in [0, 1)", "Change it.")
        if not 0 < self.pass_decay <= 1:
            raise InputError("pass_decay", self.pass_decay, "a weight in (0, 1]", "Change it.")
        if not self.lk_eta >= 0:
            raise InputError("lk_eta", self.lk_eta, "0 or more", "Change it.")
        if self.rope_theta is not None and not self.rope_theta > 0:
            raise InputError("rope_theta", self.rope_theta, "a rotary base above 0", "Change it.")

    def num_passes(self, step: TrainStep | None) -> int:
        """Passes that this step trains on; validation measures all."""
        late = step is None or step.number >= round(self.passes_after * step.total)
        return self.passes if late else 1

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.lk_eta, self.lk_over == "batch", self.unknown == "drop")


@dataclass(frozen=True)
class Eagle3Inputs:
    """A `FeatureBatch` paired for the head. Row t of pass j has read x_{t+1+j} and predicts what follows it: the
    target's distribution at position s = t+1+j, which its final state there gives.

    next_ids [B, T]: x_{t+1} at t. states [B, T, n H]. Of the N positions s that count, in any pass: sequence [N] and
    position [N] in the batch; place [N] in their own sequences, of which they are `owner` [N]; wanted [N, H].
    """

    next_ids: Tensor
    states: Tensor
    sequence: Tensor
    position: Tensor
    place: Tensor
    owner: Tensor
    wanted: Tensor

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Which rows [N] of pass `number` predict at the positions, and where [N] (bool) there is such a row: drafts
        begin inside their sequence."""
        return (self.position - 1 - number).clamp_min(0), self.place > number


def counted(batch: FeatureBatch, mask: Mask) -> Tensor:
    """Positions s [B, T] (bool) at which predictions count; the first of a sequence is nobody's."""
    own, first = batch.loss_mask, batch.position_ids == 0
    if mask == "previous":
        own = F.pad(own[:, :-1], (1, 0))
    elif mask == "predicted":
        own = F.pad(own[:, 1:] & ~first[:, 1:], (0, 1))
    own = own & ~first
    return own if batch.attention_mask is None else own & batch.attention_mask


def owners(batch: FeatureBatch) -> Tensor:
    """Which sequence [B, T] a token is of."""
    if batch.lengths is None:
        return torch.arange(len(batch.input_ids), device=batch.input_ids.device)[:, None].expand_as(batch.input_ids)
    sizes = torch.tensor(batch.lengths)
    return to_device(torch.arange(len(sizes)).repeat_interleave(sizes)[None], batch.input_ids.device)


def paired(batch: FeatureBatch, mask: Mask, size: int, count: int | None = None) -> Eagle3Inputs:
    """The one place where the pairing is made. size: H; features are the states that the head reads and, last, the
    final one. count: positions that count, where the host knows it."""
    assert batch.features is not None, "the target reads the batch first"
    chosen, width = true_places(counted(batch, mask), count), batch.input_ids.shape[1]

    def of_chosen(values: Tensor) -> Tensor:
        return values.flatten(0, 1).index_select(0, chosen)

    return Eagle3Inputs(
        next_ids=F.pad(batch.input_ids[:, 1:], (0, 1)),
        states=batch.features[..., :-size],
        sequence=chosen // width,
        position=chosen % width,
        place=of_chosen(batch.position_ids),
        owner=of_chosen(owners(batch)),
        wanted=of_chosen(batch.features[..., -size:]),
    )


class Eagle3Head(Eagle3Net, FeatureHead):
    """EAGLE-3: it reads the inputs of some of the target's layers, and its own state in the place of the next ones. It
    has an lm_head of its own, often over fewer tokens than the target's; the embedding is the target's and not in this
    directory."""

    kind = "eagle3"
    Config, Settings = Eagle3Config, Eagle3Settings
    # SafeAILab/EAGLE eagle/traineagle3, but for the learning rate, SpecForge's and TorchSpec's.
    defaults: ClassVar[dict[str, Any]] = {"epochs": 10, "lr": 1e-4, "betas": (0.9, 0.95), "clip": 0.5}
    starts = ("random", "target-last-layer")
    passes = "passes"
    monitor = "chain_length"
    whole_weights = True  # of its lm_head

    @property
    def capture(self) -> tuple[int, ...]:
        return self.config.capture

    @classmethod
    def learns_from(cls, config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
        return (*config.capture, num_layers)  # the last one for the target's distributions

    @classmethod
    def card(cls, head: Mapping[str, Any]) -> HeadCard:
        card, shape = super().card(head), list[str]()
        if llama := head.get("llama"):
            layers = ", ".join(map(str, head["capture"]))
            heads = f"{llama['num_heads']} heads of {llama['head_dim']} ({llama['num_kv_heads']} of keys and values)"
            sizes = f"width {llama['hidden_size']}, MLP of {llama['intermediate_size']}"
            vocabulary = f"drafts {head['draft_vocab_size']:,} of {llama['vocab_size']:,} tokens"
            rope = f"rotary base {llama['rope_theta']:g}, scaling {llama['rope_scaling']['kind']}"
            shape = [f"- reads the inputs of layers {layers}; {heads}, {sizes}; {vocabulary}; {rope}"]
        metrics = {
            "top1": "how often its first choice is the target's, tokens that it cannot draft among the misses",
            "accepted": "probability that its first drawn token is accepted, at temperature 1",
            "chain_length": "tokens a round that drafts of so many passes would emit at temperature 1",
            "chain_length_greedy": "the same of greedy decoding",
        }
        return dataclasses.replace(card, title="EAGLE-3 head", shape=tuple(shape), metrics=metrics)

    # -- training

    @classmethod
    def shape(cls, settings: Eagle3Settings, target: LlamaConfig) -> Eagle3Config:
        vocabulary = min(settings.draft_vocab or target.vocab_size, target.vocab_size)
        layer = layer_like(target, settings.rope_theta, settings.rope == "plain")
        capture, late = layers_of(settings.layers, target.num_layers), settings.version == "3.1"
        return Eagle3Config(layer, capture, vocabulary, fc_norm=late, norm_output=late)

    @classmethod
    def check_start(cls, settings: Eagle3Settings, config: Eagle3Config) -> None:
        if settings.layers not in ((), config.capture):
            expected = f"{config.capture}, as the head of --init reads"
            raise InputError("layers", settings.layers, expected, "Leave --layers out, or start from another head.")

    def start(self, name: str, weights: TargetWeights) -> None:
        lm_head = weights.lm_head()
        if self.config.reduced:
            self.use_draft_vocabulary(
                draft_vocabulary(weights.token_counts(), self.config.draft_vocab_size, weights.end_ids), lm_head
            )
        else:
            self.use_draft_vocabulary(self.d2t, lm_head)
        self.of_target = ("lm_head.weight",)
        if name == "target-last-layer":
            self.init_from_target(weights.last_layer())

    def go_on(self, weights: TargetWeights) -> None:
        if self.of_target:
            self.use_draft_vocabulary(self.d2t, weights.lm_head())

    def freeze(self, settings: Eagle3Settings) -> None:
        self.lm_head.requires_grad_(settings.train_lm_head)
        if settings.train_lm_head:
            self.of_target = ()

    @classmethod
    def num_loss_tokens(cls, batch: FeatureBatch) -> int:
        return int(counted(batch, "input").sum())

    @classmethod
    def num_chosen(cls, batch: FeatureBatch, settings: Eagle3Settings) -> int:
        return int(counted(batch, settings.token_mask).sum())

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Eagle3Settings) -> float:
        if settings.normalizer == "padded":
            return batch.input_ids.numel()
        chosen = counted(batch, settings.token_mask)
        return int(chosen.sum() if settings.normalizer == "tokens" else owners(batch)[chosen].unique().numel())

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: Eagle3Settings, step: TrainStep | None
    ) -> LossOutput:
        return self._compared(batch, target, settings, settings.num_passes(step), step)[0]

    def validation(self, batch: FeatureBatch, target: CausalLM, settings: Eagle3Settings) -> LossOutput:
        """The loss, with what drafts of so many passes would come to."""
        output, pairs, found = self._compared(batch, target, settings, settings.passes)
        sums, counts = dict(output.sums), dict(output.counts)
        for name, values in {"accept": found.accepted, "agreement": found.right.float()}.items():
            own_sums, own_counts = along_drafts(pairs, values, batch.input_ids.shape)
            names = [f"{name}_{j + 1}" for j in range(len(values))]
            names.append("chain_length" if name == "accept" else "chain_length_greedy")
            sums |= dict(zip(names, own_sums, strict=True))
            counts |= dict(zip(names, own_counts, strict=True))
        return LossOutput(output.loss, sums, counts)

    def _compared(
        self,
        batch: FeatureBatch,
        target: CausalLM,
        settings: Eagle3Settings,
        passes: int,
        step: TrainStep | None = None,
    ) -> tuple[LossOutput, Eagle3Inputs, Distances]:
        chosen, count = (None, None) if step is None else (step.chosen, step.loss_count)
        pairs = paired(batch, settings.token_mask, self.config.hidden_size, chosen)
        dtype = self.fc.weight.dtype
        ids = F.pad(pairs.next_ids, (0, passes - 1))
        documents = documents_of(batch.lengths, ids.device)
        hidden = self.unroll(target.embed(ids).to(dtype), pairs.states.to(dtype), passes, batch.position_ids, documents)
        predictions, inside = [], []
        for number, states in enumerate(hidden):
            rows, there = pairs.rows(number)
            predictions.append(self.logits_input(states[pairs.sequence, rows]))
            inside.append(there)
        weights = torch.stack(inside).to(torch.promote_types(dtype, torch.float32))
        if settings.normalizer == "sequence":
            # Not by `bincount`, which waits for the device.
            own = weights.new_zeros(len(batch.input_ids if batch.lengths is None else batch.lengths))
            weights = weights / own.index_add_(0, pairs.owner, torch.ones_like(weights[0]))[pairs.owner]
        measured = step is None or step.logged
        found = distances(
            settings.objective,
            lambda part: target.lm_head(pairs.wanted[part].to(target.dtype)),
            self.lm_head.weight,
            self.d2t if self.config.reduced else None,
            predictions,
            weights,
            measured,
        )
        scale = to_device(
            torch.tensor([settings.pass_decay**i for i in range(passes)], dtype=weights.dtype), weights.device
        )
        if settings.pass_weights == "mean":
            scale = scale / scale.sum()
        total = (scale * found.totals).sum()
        sums = {"loss": total.detach()}
        if measured:
            sums |= {"top1": found.right[0].sum(), "accepted": found.accepted[0].sum()}
            if self.config.reduced:
                sums["known"] = found.known.sum()
        counts = dict.fromkeys(sums, torch.full((), len(pairs.place), device=weights.device))
        count = self.loss_count(batch, settings) if count is None else count
        counts["loss"] = torch.full((), int(count), device=weights.device)
        return LossOutput(total / counts["loss"].clamp_min(1), sums, counts), pairs, found

    @classmethod
    def flops(cls, config: Eagle3Config, settings: Eagle3Settings, step: TrainStep, loss_tokens: int) -> float:
        return eagle3_training(config, step.lengths, loss_tokens, settings.num_passes(step), settings.train_lm_head)

    # -- decoding

    def lean(self, target: CausalLM) -> LeanEagle3:
        return LeanEagle3(self, target, self.precision)


def layers_of(asked: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read: what was asked for, or 2, L/2 and L-3.

    Raises:
        InputError: they are not distinct layers of the target, as 2, L/2 and L-3 are not where it has fewer than seven.
    """
    layers = tuple(asked) or default_layers(num_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        found = " ".join(map(str, layers)) + ("" if asked else ", the default")
        expected = f"distinct ones below {num_layers}, the target's layers, ascending"
        raise InputError("layers", found, expected, "Pass --layers with such.")
    return layers


def draft_vocabulary(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Ids [size], ascending, of the most frequent tokens of counts [V], of equally frequent ones the lower; `always`
    are among them whatever their counts."""
    wanted = counts.clone()
    wanted[list(always)] = wanted.max() + 1
    return wanted.sort(descending=True, stable=True).indices[:size].sort().values


def along_drafts(pairs: Eagle3Inputs, values: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
    """Sums and counts of the first, second, ... token's chance of acceptance, values [P, N], where the ones before it
    were accepted; last, of the tokens that a round emits, over drafts that lie wholly in what counts.

    The tokens that drafts read are those of the data: greedily, a draft that is right so far is what would be drafted.
    """
    sums, counts = [], []
    reached: Tensor | None = None
    inside: Tensor | None = None
    length = torch.ones(shape, device=values.device)
    for number, own in enumerate(values):
        rows, there = pairs.rows(number)
        chance, known = (torch.zeros(shape, device=values.device) for _ in range(2))
        chance[pairs.sequence[there], rows[there]] = own[there].float()
        known[pairs.sequence[there], rows[there]] = 1.0
        inside = known if inside is None else inside * known
        reached = inside if reached is None else reached * known
        counts.append(reached.sum())
        reached = reached * chance
        sums.append(reached.sum())
        length = length + reached
    assert inside is not None
    return [*sums, (length * inside).sum()], [*counts, inside.sum()]


def pair_layer(config: LlamaConfig, rows: int) -> float:
    """FLOPs of the matrices of the layer, whose attention reads embedding and state side by side."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return flops.layer_matrices(config, rows) + flops.linear(config.hidden_size, queries + 2 * keys, rows)


def eagle3_training(
    config: Eagle3Config, lengths: Sequence[int], loss_tokens: int, passes: int, trained_lm_head: bool
) -> float:
    """Forward and backward of a head and its loss, from features that are there; what later passes see beside the first
    is little. lengths: tokens of each document. loss_tokens: those whose logits are made, the target's once."""
    llama, size, rows = config.llama, config.hidden_size, sum(lengths)
    layer = pair_layer(llama, rows) + flops.attention(llama, flops.causal_pairs(lengths))
    fused = flops.TRAINED_FIRST * flops.linear(len(config.capture) * size, size, rows)
    logits = flops.linear(size, config.draft_vocab_size, loss_tokens)
    head = passes * logits * (flops.TRAINED if trained_lm_head else flops.FROZEN_PASSING)
    return passes * flops.TRAINED * layer + fused + head + flops.lm_head_forward(llama, loss_tokens)


@dataclass(frozen=True)
class Eagle3Chain(FixedK):
    """An EAGLE-3 head drafts a chain of k tokens a round (Li et al. 2025)."""

    uses = ("eagle3",)


@dataclass(frozen=True)
class Eagle3Tree(DynamicTrees):
    """An EAGLE-3 head drafts the dynamic trees of EAGLE-2 (Li et al. 2025, section 3)."""

    uses = ("eagle3",)


@dataclass(frozen=True)
class Eagle3StaticTree(StaticTrees):
    """An EAGLE-3 head drafts EAGLE-1's static tree, or any from a YAML list of paths of ranks."""

    uses = ("eagle3",)


METHODS = {"eagle3": Eagle3Chain, "eagle3-tree": Eagle3Tree, "eagle3-static": Eagle3StaticTree}
