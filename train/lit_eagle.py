"""Training of the EAGLE head (EAGLE section 4.2) on the target's features, stored or computed right before it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
from draftsmith.modules.drafters.eagle.head import LOOKAHEAD, EagleHead, shift
from draftsmith.modules.flops import eagle_training
from draftsmith.modules.losses import unrolled_eagle_loss
from draftsmith.modules.packing import documents_of
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput, SamplingParams
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import Part, move
from draftsmith.train.feature_source import FeatureSource
from draftsmith.train.lit_head import Frozen, LitHead
from draftsmith.train.metrics import Means, num_ranks, rank, total
from draftsmith.train.telemetry import features_flops

# Logits held at once where only the best token is asked for: 256 MB in bf16 for a vocabulary of 128k.
CHOICE_ROWS = 1024


def num_loss_tokens(batch: FeatureBatch) -> int:
    """Positions that count in the loss, after the head's pairing. The features need not be there yet."""
    return int(shift(dataclasses.replace(batch, features=batch.loss_mask[..., None])).loss_mask.sum())


class LitEagle(LitHead):
    """parts hold a `FeatureBatch`. The target gives embedding and lm_head, both frozen."""

    monitor, larger_is_better = "top1", True
    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        config: TrainConfig,
        total_steps: int,
        *,
        feature_weight: float,
        token_weight: float,
        noise: float,
        feature_std: float,
        unroll: int = 1,
        unroll_after: float = 0.0,
        unroll_decay: float = 1.0,
        agreement_steps: int = 0,
        source: FeatureSource | None = None,
    ):
        """noise: features are read with U(-noise, noise) * feature_std added, so that the head learns to draft on its
        own imprecise ones.

        unroll: from `unroll_after` of the steps on, each batch is also read as the second, ... and `unroll`-th step of
            a draft; `unroll_decay` is the loss weight of a step relative to the one before (`EagleHead.unroll`).
        agreement_steps: draft steps whose agreement with the target is measured in validations.
        source: of the features of batches that come without; None is the target alone.
        """
        super().__init__(head, config, total_steps)
        self.target = Frozen(target)
        self.feature_weight, self.token_weight = feature_weight, token_weight
        self.noise = noise * feature_std
        self.unroll, self.unroll_decay = unroll, unroll_decay
        self.unroll_from = round(unroll_after * total_steps)
        self.agreement_steps = agreement_steps
        self.source = source or FeatureSource(target)
        self._epoch = 0

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits; the gradient flows to `hidden`."""
        return self.target.model.lm_head(hidden.to(self.target.model.dtype))

    def features_of(self, data: FeatureBatch) -> FeatureBatch:
        """The batch with its features: those it came with, or the target's, without gradient and in its own dtype,
        whatever autocast is around it."""
        if data.features is not None:
            self.source.join()
            return data
        assert data.attention_mask is not None
        documents = documents_of(data.lengths, data.input_ids.device)
        if documents is None:
            return dataclasses.replace(data, features=self.source(data.input_ids, data.attention_mask.sum(-1).tolist()))
        features = self.source(documents.side_by_side(data.input_ids), documents.lengths)
        return dataclasses.replace(data, features=documents.end_to_end(features))

    def loss(self, part: Part, epoch_noise: bool) -> LossOutput:
        data = self.features_of(part.data)
        if part.data.features is None:  # stored ones were looked at when they were read
            assert data.features is not None
            self.bad_steps.given("target", data.features)
        return self._loss_with_features(dataclasses.replace(part, data=data), epoch_noise)

    def _loss_with_features(self, part: Part, epoch_noise: bool) -> LossOutput:
        pair = shift(part.data)
        dtype = self.head.fc.weight.dtype
        features = pair.features.to(dtype)
        if epoch_noise and self.noise:
            features = features + self._noise_of(part, features)
        embeds = self.target.model.embed(pair.next_ids).to(dtype)
        steps = self._num_passes() if epoch_noise else 1
        return unrolled_eagle_loss(
            self.head.unroll(embeds, features, steps, pair.position_ids, pair.documents),
            pair.target_features,
            [pair.mask_of_step(step) for step in range(steps)],
            self.lm_head,
            self.feature_weight,
            self.token_weight,
            self.unroll_decay,
        )

    def _num_passes(self) -> int:
        return self.unroll if self.unroll > 1 and self.trainer.global_step >= self.unroll_from else 1

    def flops(self, part: Part) -> float:
        lengths, config = self.lengths_of(part), self.head.config.llama
        rows = [max(length - LOOKAHEAD, 0) for length in lengths]
        online = features_flops(self.target.model, lengths) if part.data.features is None else 0.0
        return online + eagle_training(config, rows, int(part.tokens), self._num_passes())

    def _noise_of(self, part: Part, features: Tensor) -> Tensor:
        """Noise like `features` that depends on (seed, epoch, sample) and not on what shares the sample's batch."""
        noise = torch.zeros_like(features)
        generator = torch.Generator(features.device)
        lengths = self.samples.lengths
        # As many numbers as the sample has rows, padding aside: a device's generator gives other ones otherwise.
        sizes = [max(0, lengths[key.index] - LOOKAHEAD) for key in part.keys]
        flat = part.data.lengths is not None
        rows = noise[0].split(sizes) if flat else [row[:size] for row, size in zip(noise, sizes, strict=True)]
        for key, row in zip(part.keys, rows, strict=True):
            generator.manual_seed((self.config.seed * 1_000_003 + key.epoch) * 1_000_003 + key.index)
            row.uniform_(-self.noise, self.noise, generator=generator)
        return noise

    def on_train_batch_start(self, batch: Part, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch.keys[0].epoch != self._epoch:  # what was computed in an epoch is to be read in the next
            self._epoch = batch.keys[0].epoch
            self.source.flush()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.source.flush()

    @torch.no_grad()
    def validate(self, parts: Iterable[Part]) -> dict[str, float]:
        """loss, feature_loss and token_loss without noise, and top1 and top3: how often the target's argmax is the
        head's first choice, or among its first three. Teacher-forced, on response tokens. And `agreement`.

        Raises:
            NonFinite: the target's features.
        """
        means = Means()
        for part in parts:
            part = move(part, self.device)
            part = dataclasses.replace(part, data=self.features_of(part.data))
            self.check_given("target", part, part.data.features)
            means.add(self._loss_with_features(part, epoch_noise=False))
            if self.agreement_steps:
                means.add(self.agreement(part))
        self.source.finish()
        metrics = means.take()
        if not metrics:
            raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
        return metrics

    @torch.no_grad()
    def agreement(self, part: Part) -> LossOutput:
        """agreement_1, agreement_2, ...: how often a draft's first, second, ... token is the target's choice, of the
        drafts whose tokens before were all right. (The loss means nothing.)

        A draft begins at every response row, and from its second step on it reads the head's own features and tokens.
        The tokens that it reads are those of the data, so it is followed only as long as it chose them: on text that
        the target wrote greedily the numbers are those of greedy drafting.
        """
        pair = shift(self.features_of(part.data))
        dtype = self.head.fc.weight.dtype
        embeds = self.target.model.embed(pair.next_ids).to(dtype)
        passes = self.head.unroll(
            embeds, pair.features.to(dtype), self.agreement_steps, pair.position_ids, pair.documents
        )
        wanted = self._choices(pair.target_features.to(dtype), pair.loss_mask)
        # The next row goes on with the same document, and with a response in it.
        follows = pair.loss_mask[:, 1:] & (pair.position_ids[:, 1:] == pair.position_ids[:, :-1] + 1)
        drafted = pair.loss_mask.clone()  # rows that step j of a draft, begun j rows before, has reached
        sums, counts = {}, {}
        for j, hidden in enumerate(passes, start=1):
            chosen = self._choices(hidden, drafted)
            right = drafted & (chosen == wanted)
            sums[f"agreement_{j}"], counts[f"agreement_{j}"] = right.sum(), drafted.sum()
            drafted = torch.zeros_like(drafted)
            drafted[:, 1:] = (right & (chosen == pair.predicted_ids))[:, :-1] & follows
        return LossOutput(torch.zeros((), device=self.device), sums, counts)

    def _choices(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Token ids [B, T] that `hidden` [B, T, H] gives greedily at `rows` [B, T] (bool), and -1 elsewhere. Logits are
        made for CHOICE_ROWS rows at a time."""
        choices = torch.full(rows.shape, -1, device=rows.device)
        chosen = [self.lm_head(some).argmax(-1) for some in hidden[rows].split(CHOICE_ROWS)]
        choices[rows] = torch.cat(chosen) if chosen else choices[rows]
        return choices


class TauProbe:
    """Real tau: greedy chain decoding of prompts, as `draftsmith decode` does it.

    measured: on what, in words.
    """

    def __init__(
        self, module: LitEagle, prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int, ignore_eos: bool = True
    ):
        """prompts: the same on every rank; each rank decodes its share, or all where the ranks are one target.
        ignore_eos: go on behind end tokens."""
        self.module, self.prompts, self.k, self.max_new_tokens = module, prompts, k, max_new_tokens
        self.ignore_eos = ignore_eos
        lengths = sorted(map(len, prompts))
        sizes = f"{lengths[0]:,}" if lengths[0] == lengths[-1] else f"{lengths[0]:,} to {lengths[-1]:,}"
        until = "each, end tokens ignored" if ignore_eos else "at most"
        self.measured = f"tau on {len(prompts)} prompt(s) of {sizes} tokens, {max_new_tokens} {until}, chains of {k}"

    def __call__(self) -> dict[str, float]:
        """tau over all prompts of all ranks: emitted tokens per target call; and tau_behind_end, the share of these
        tokens that is behind an end token, where these are ignored."""
        target = self.module.target.model
        # A copy where the target computes in another type: training goes on in the head's own.
        head = self.module.head
        if head.fc.weight.dtype != target.dtype:
            head = copy.deepcopy(head).to(target.dtype)
        counts = torch.zeros(3, dtype=torch.float64)
        # A target that is spread over the ranks decodes with all of them at once.
        own = self.prompts if self.module.source.shared else self.prompts[rank() :: num_ranks()]
        with torch.autocast(target.device.type, enabled=False):
            for prompt in own:
                capacity = len(prompt) + self.max_new_tokens + self.k + 2
                drafter = EagleDrafter(head, target, [FixedLength(self.k)], capacity)
                params, source = SamplingParams(), TorchSource(0)
                ends = () if self.ignore_eos else None
                made = generate_one(target, drafter, prompt, params, self.max_new_tokens, source, ends)
                behind = _behind_end(made.tokens, target.info.eos_ids)
                counts += torch.tensor(
                    [made.trace.num_tokens, made.trace.num_target_calls, behind], dtype=torch.float64
                )
        tokens, calls, behind = total(counts.to(self.module.device)).tolist()
        if not calls:
            return {}
        return {"tau": tokens / calls} | ({"tau_behind_end": behind / tokens} if self.ignore_eos else {})


def _behind_end(tokens: Sequence[int], eos_ids: Sequence[int]) -> int:
    """How many tokens come after the first end token."""
    first = next((i for i, token in enumerate(tokens) if token in eos_ids), len(tokens) - 1)
    return len(tokens) - 1 - first
