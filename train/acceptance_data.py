"""Drafted tokens that an acceptance head learns from, and its training (SpecDec++, Huang et al. 2024, section 3.3).

Labels of mixed text are read by the draft in every step (`MixedText`). Labels of real rounds are read once, before the
first step, and kept in memory (`RolloutReader`): tokens of one answer are alike, so every batch is drawn from all
answers, and a step costs no forward of the drafter.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import progress_bar
from draftsmith.data.store.datasets import AcceptanceTokens, Item, RolloutTokens, collate_rollouts
from draftsmith.modules.acceptance.head import (
    FEATURES,
    AcceptanceHead,
    AcceptanceHeadConfig,
    acceptance_training,
)
from draftsmith.modules.acceptance.metrics import acceptance_metrics, expected_calibration_error, fit_platt
from draftsmith.modules.decoding.confidence import TokenConfidence
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput
from draftsmith.train.acceptance_fitting import predicted
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import MicroBatch, Samples
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import gather_rows
from draftsmith.train.telemetry import features_flops

# Tokens of a training sample: enough that a batch is collated quickly, few enough that it is drawn from many answers.
BLOCK = 64
# Tokens that fewer rounds reach count for nothing measurable, and are most of what was drafted.
LEAST_WEIGHT = 1e-3
# Stored tokens that are read at once outside of training steps.
TOKENS_AT_ONCE = 2**14


@dataclass(frozen=True)
class DraftedTokens:
    """The N tokens of a batch that count.

    batch: their inputs and labels, [N] in place of [B, T]. row: [N] int64, the row of the batch that each belongs to.
    log_q: [N] log-probability of the token under the draft, if asked for.
    """

    batch: AcceptanceBatch
    row: Tensor
    log_q: Tensor | None = None


class MixedText:
    """Reader of labels of mixed text: the draft reads z, and the head reads its states after each token."""

    weighted = False

    def __init__(self, drafter: FrozenDrafter, greedy: bool):
        """drafter: a language model. greedy: the labels are those of greedy decoding."""
        self.drafter, self.lm, self.model, self.greedy = drafter, drafter.lm, drafter.name, greedy

    def read(self, data: AcceptanceTokens, with_log_q: bool = False) -> DraftedTokens:
        """Return states and labels of a collated batch."""
        with torch.no_grad():
            hidden = self.lm.features(data.z_ids)  # [B, T, H]
        mask, log_q = data.loss_mask, data.log_q
        if with_log_q and self.greedy:
            # The q of greedy labels is one-hot, so that log q says nothing: take q at temperature 1.
            log_q = torch.zeros(data.z_ids.shape, device=hidden.device)
            # One row at a time, so that [T, V] is in memory, not [B, T, V].
            for row in range(len(log_q)):
                log_prob = self.lm.lm_head(hidden[row, :-1]).float().log_softmax(-1)
                log_q[row, 1:] = log_prob.gather(-1, data.z_ids[row, 1:, None])[:, 0]
        batch = AcceptanceBatch(hidden[mask], data.accept_prob[mask], mask[mask])
        return DraftedTokens(batch, mask.nonzero()[:, 0], log_q[mask] if with_log_q else None)


@dataclass(frozen=True)
class StoredTokens:
    """N drafted tokens of real rounds, as the drafter reads them.

    weight: probability that a round verifies the token. owner: the answer that it belongs to; of a collated batch, the
    sample.
    """

    ids: Tensor  # [N] int64
    hidden: Tensor  # [N, H], of the drafter's type
    features: Tensor  # [N, F] float32; F is 0 for a head that reads none
    log_q: Tensor  # [N] float32, as all below
    accept_prob: Tensor
    weight: Tensor
    owner: Tensor  # [N] int64
    loss_mask: Tensor  # [N] bool

    def __getitem__(self, rows: Tensor | slice) -> StoredTokens:
        return StoredTokens(**{name: values[rows] for name, values in vars(self).items()})

    @staticmethod
    def joined(parts: Sequence[StoredTokens]) -> StoredTokens:
        """Concatenate parts."""
        names = [field.name for field in fields(StoredTokens)]
        return StoredTokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class RolloutReader:
    """Reader of labels of real rounds: the drafter reads each text once, with all drafts that branch off it."""

    weighted = True

    def __init__(self, drafter: FrozenDrafter, head: AcceptanceHeadConfig, depth: int):
        """head: settings of the head that reads. depth: tokens of a draft."""
        self.drafter, self.head, self.model = drafter, head, drafter.name
        self.branches = drafter.branches(depth)

    def read_rollouts(self, data: RolloutTokens) -> StoredTokens:
        """Return states and labels of the labelled tokens, by the drafter's forward."""
        head, mask = self.head, data.loss_mask
        # [drafts, K] -> [N], labelled tokens only.
        known = TokenConfidence(*(None if values is None else values[mask] for values in data.confidences))
        ids = data.draft_ids[mask]
        read = [FEATURES[name](known) for name in head.features]
        return StoredTokens(
            ids=ids,
            hidden=self.states(data)[mask],
            features=torch.stack(read, -1) if read else torch.empty(len(ids), 0),
            log_q=known.log_q,
            accept_prob=data.accept_prob[mask],
            weight=data.weight[mask],
            owner=data.owner[:, None].expand(mask.shape)[mask],
            loss_mask=mask[mask],
        )

    def states(self, data: RolloutTokens) -> Tensor:
        """Return the drafter's states [drafts, K, H] before each token, or after it."""
        late, depth = self.head.state == "after", data.draft_ids.shape[1]
        states, first = [], 0
        for text, starts in zip(data.texts, data.starts, strict=True):
            drafted = data.draft_ids[first : first + len(starts)]  # [S, K]
            first += len(starts)
            self.branches.open(text[: starts[-1]], self.drafter.features(text, starts[-1]))
            # The last token need only be read for a head that reads states after the tokens.
            read = self.branches.states(starts, drafted if late or depth == 1 else drafted[:, :-1])
            states.append(read[:, 1:] if late else read[:, :depth])  # [S, K, H]
        # Behind a block drafter's state stands its Markov head's. A copy: tensors of inference mode cannot be inputs of
        # a graph.
        return torch.cat(states)[..., : self.head.hidden_size].to(data.draft_ids.device).clone()

    def store(self, samples: Samples, title: str) -> StoredTokens:
        """Read the tokens of labelled answers, answer after answer. title: of the progress bar.

        Raises:
            InputError: no round reaches any token.
        """
        parts: list[StoredTokens] = []
        with progress_bar(title, len(samples), "answers") as advance:
            for index in range(len(samples)):
                tokens = self.read_rollouts(collate_rollouts([samples.item(index, 0)]))
                tokens = dataclasses.replace(tokens, owner=torch.full_like(tokens.ids, index))
                parts.append(tokens[tokens.weight >= LEAST_WEIGHT])
                advance(1)
        tokens_of_all = StoredTokens.joined(parts)
        if not len(tokens_of_all.ids):
            raise InputError("data", "no drafted token that a round reaches", "labels of real rounds", "Make more.")
        return tokens_of_all

    def read(self, data: StoredTokens, with_log_q: bool = False) -> DraftedTokens:
        """Return stored tokens with the embeddings that the head reads."""
        embeds = None
        if self.head.reads_token:
            with torch.no_grad():
                embeds = self.branches.embed(data.ids).to(data.ids.device)  # [N, H]
        features = data.features if self.head.features else None
        batch = AcceptanceBatch(data.hidden, data.accept_prob, data.loss_mask, data.weight, embeds, features)
        return DraftedTokens(batch, data.owner, data.log_q if with_log_q else None)

    def batches(self, tokens: StoredTokens) -> Iterator[AcceptanceBatch]:
        """Yield stored tokens in their order, TOKENS_AT_ONCE at a time."""
        for start in range(0, len(tokens.ids), TOKENS_AT_ONCE):
            yield self.read(tokens[slice(start, start + TOKENS_AT_ONCE)]).batch


class StoredDataset:
    """Stored tokens as samples: blocks of tokens of all answers, shuffled once; or, for validation, whole answers."""

    def __init__(self, tokens: StoredTokens, answers: Samples, seed: int | None):
        """answers: that the tokens belong to. seed: of the blocks; None for whole answers."""
        self.answers = answers
        if seed is None:
            self.tokens = tokens
            self.bounds = torch.bincount(tokens.owner, minlength=len(answers)).cumsum(0).tolist()
        else:
            # Shuffled once: the order of blocks changes every epoch.
            order = torch.randperm(len(tokens.ids), generator=torch.Generator().manual_seed(seed))
            self.tokens = tokens[order]
            self.bounds = [*range(BLOCK, len(order), BLOCK), len(order)]
        self.lengths = np.diff(self.bounds, prepend=0).tolist()
        self.by_answer = seed is None

    def item(self, index: int, epoch: int) -> Item:
        start = self.bounds[index] - self.lengths[index]
        return dict(vars(self.tokens[slice(start, self.bounds[index])]))

    def name(self, index: int) -> str:
        """Return the answer's name; of a block, that of its first token's answer."""
        start = self.bounds[index] - self.lengths[index]
        return self.answers.name(index if self.by_answer else int(self.tokens.owner[start]))

    def answer_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Return the tokens of every answer that drafts were made along."""
        return self.answers.dataset.answer_lengths(self.answers.indices)


def collate_stored(items: Sequence[Item]) -> StoredTokens:
    """Concatenate samples; the owner of each token becomes its sample's place among them."""
    counts = torch.tensor([len(item["ids"]) for item in items])
    owner = torch.arange(len(items)).repeat_interleave(counts)
    batch = StoredTokens.joined([StoredTokens(**item) for item in items])
    return dataclasses.replace(batch, owner=owner)


class LitAcceptance(LitHead):
    """An acceptance head in training: weighted BCE, and its calibration. Batches hold what `reader` reads."""

    head: AcceptanceHead
    monitor, larger_is_better = "kl", False

    def __init__(self, head: AcceptanceHead, reader: MixedText | RolloutReader, config: TrainConfig, total_steps: int):
        super().__init__(head, config, total_steps, frozen=reader.model)
        self.reader = reader
        # A head for real rounds starts as a logistic, which may stay the best.
        self.validates_first = reader.weighted

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["calibration"] = list(self.head.config.calibration)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        scale, shift = checkpoint["calibration"]
        self.head.config = dataclasses.replace(self.head.config, calibration=(scale, shift))

    def read(self, batch: MicroBatch, validating: bool = False) -> tuple[DraftedTokens, Tensor]:
        tokens = self.reader.read(batch.data, with_log_q=validating)
        return tokens, tokens.batch.hidden

    def loss(self, inputs: DraftedTokens, step: TrainStep | None) -> LossOutput:
        config = self.head.config
        return acceptance_loss(predicted(self.head, inputs.batch), inputs.batch, config.w_acc, config.w_rej)

    def flops(self, batch: MicroBatch) -> float:
        config, reader = self.head.config, self.reader
        if isinstance(reader, RolloutReader):
            # The drafter has read all texts before the first step.
            return acceptance_training(config, len(batch.data.ids))
        return features_flops(reader.lm, batch.real_lengths) + acceptance_training(config, int(batch.tokens))

    @torch.no_grad()
    def validate(self, batches: Iterable[MicroBatch]) -> dict[str, float]:
        """Return kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss weights imply.

        loss is the weighted loss. Tokens of rollouts count by their weights. ece_platt is that of a
        calibration by 2-fold cross-fitting over samples; the head keeps the fit to all of them.
        """
        # [N, 4] of all ranks: raw logit, accept_prob, log_q, sample; and weight for readers with weights.
        head = self.head
        device = next(head.parameters()).device
        rows = [torch.empty(0, 4 + self.reader.weighted, device=device)]
        for micro_batch, inputs in self.validated(batches):
            batch, log_q = inputs.batch, inputs.log_q
            assert log_q is not None
            sample = torch.tensor([key.index for key in micro_batch.keys], device=device)[inputs.row]
            columns = [predicted(head, batch), batch.accept_prob, log_q, sample]
            columns += [batch.weight] if batch.weight is not None else []
            rows.append(torch.stack([column.float() for column in columns], dim=1))
        gathered = gather_rows(torch.cat(rows))
        if not len(gathered):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample, *weights = gathered.unbind(1)
        weight = weights[0] if weights else None

        # Metrics are those of the uncalibrated head.
        plain = dataclasses.replace(head.config, calibration=(1.0, 0.0))
        head.config = plain
        logit = head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q, weight)
        # Every gathered token counts.
        everything = AcceptanceBatch(raw, accept_prob, torch.ones_like(raw, dtype=torch.bool), weight)
        metrics["loss"] = float(acceptance_loss(raw, everything, plain.w_acc, plain.w_rej).loss)
        metrics["ece_platt"] = cross_fitted_ece(head, raw, accept_prob, sample, weight)
        head.config = dataclasses.replace(plain, calibration=fit_platt(logit, accept_prob, weight=weight))
        return metrics


def cross_fitted_ece(
    trained: AcceptanceHead, raw: Tensor, accept_prob: Tensor, sample: Tensor, weight: Tensor | None
) -> float:
    """Return the ECE of the calibration, each half of the samples predicted by the fit to the other half."""
    # The same weights, under settings that may change.
    head = copy.copy(trained)
    logit, calibrated = head.corrected(raw), torch.empty_like(raw)
    for half in (0, 1):
        mine = sample % 2 == half
        # One sample: nothing to fit on.
        if mine.all() or not mine.any():
            return float("nan")
        others = None if weight is None else weight[~mine]
        fit = fit_platt(logit[~mine], accept_prob[~mine], weight=others)
        head.config = dataclasses.replace(trained.config, calibration=fit)
        calibrated[mine] = head.calibrated(raw[mine])
    return float(expected_calibration_error(torch.sigmoid(calibrated.double()), accept_prob, weight=weight))
