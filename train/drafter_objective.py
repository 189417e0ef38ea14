"""What a drafter learns: its own loss, on features of the target that are stored, or computed right before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.data.store.feature_codec import decoded
from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.packing import documents_of
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.data_module import Part
from draftsmith.train.feature_cache import FeatureCache
from draftsmith.train.lit_head import Given, Objective
from draftsmith.train.metrics import Means, num_ranks, rank
from draftsmith.train.telemetry import features_flops

# What a drafter's loss is asked with (`DraftHead.loss`), and what its validation.
Loss = Callable[[FeatureBatch, TrainStep], LossOutput]
Validation = Callable[[FeatureBatch], LossOutput]


class DrafterObjective(Objective):
    """Parts hold a `FeatureBatch`. The target gives embedding and lm_head, both frozen."""

    model = "target"

    def __init__(
        self,
        head_class: type[DraftHead],
        settings: Any,
        target: CausalLM,
        feature_std: float = 1.0,
        source: FeatureSource | None = None,
    ):
        """settings: `head_class.Settings`. feature_std: of the elements of the features. source: of the features of
        batches that come without; None is the target alone, after its final norm."""
        self.monitor, self.larger_is_better = head_class.monitor, head_class.larger_is_better
        self.head_class = head_class
        self.settings, self.target, self.feature_std = settings, target, feature_std
        self.reads = head_class.needs_features
        self.source = source or FeatureSource(target)
        self._loss: Loss | None = None
        self._validation: Validation | None = None

    def read(self, part: Part, validating: bool = False) -> Given:
        data = self.features_of(part.data)
        return Given(data, data.features if part.data.features is None else None)  # stored ones were looked at

    def features_of(self, data: FeatureBatch) -> FeatureBatch:
        """The batch with its features: those it came with, or the target's, without gradient and in its own dtype,
        whatever autocast is around it."""
        if data.features is not None or not self.reads:
            self.source.join()
            if data.features is None or data.scale is None:
                return data
            return dataclasses.replace(data, features=decoded(data.features, data.scale), scale=None)
        assert data.attention_mask is not None
        documents = documents_of(data.lengths, data.input_ids.device)
        if documents is None:
            # Only what is to be cached is cut to its length, for which a device is waited for.
            lengths = [] if self.source.cache is None else data.attention_mask.sum(-1).tolist()
            return dataclasses.replace(data, features=self.source(data.input_ids, lengths))
        features = self.source(documents.side_by_side(data.input_ids), documents.lengths)
        return dataclasses.replace(data, features=documents.end_to_end(features))

    def loss(self, head: DraftHead, given: Given, step: TrainStep) -> LossOutput:
        step = dataclasses.replace(step, feature_std=self.feature_std)
        if self._loss is not None:
            return self._loss(given.data, step)
        return head.loss(given.data, self.target, self.settings, step)

    def learn(self, loss: Loss, validation: Validation) -> None:
        """Ask these, and not the head, for the loss and for what validation measures."""
        self._loss, self._validation = loss, validation

    def measure(self, head: DraftHead, data: FeatureBatch) -> LossOutput:
        """What validation reports of a batch with features."""
        return head.validation(data, self.target, self.settings) if self._validation is None else self._validation(data)

    def validate(self, head: DraftHead, given: Iterable[tuple[Part, Given]]) -> dict[str, float]:
        """The means of what the drafter's validation reports: teacher-forced, on response tokens."""
        means = Means()
        for _, own in given:
            means.add(self.measure(head, own.data))
        self.source.finish()
        metrics = means.take()
        if not metrics:
            raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
        return metrics

    def flops(self, head: DraftHead, part: Part, step: TrainStep) -> float:
        computed = self.reads and part.data.features is None
        online = features_flops(self.target, step.lengths) if computed else 0.0
        chosen = self.head_class.num_chosen(part.data, self.settings) if part.chosen is None else part.chosen
        return online + head.flops(head.config, self.settings, step, chosen)


class FeatureSource:
    """The target's features of a batch, in its own dtype, or as a cache stores them.

    capture: which states they are (`DraftHead.capture`).
    shared: the target's layers are spread over all ranks (`--target-parallel tensor`), which therefore read together:
        every rank calls this, or `join`, for each of its batches, and `finish` where ranks may have unequally many.
    """

    def __init__(
        self, target: CausalLM, capture: tuple[int, ...] = (), cache: FeatureCache | None = None, shared: bool = False
    ):
        self._target, self._capture, self.cache, self.shared = target, capture, cache, shared

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """States [B, T, L*H] of right-padded input_ids [B, T] with `lengths` [B] real tokens each, which a cache needs.

        No logits are made, and what is on padding means nothing. With a cache they are written to it, and are what
        reading them from it gives.
        """
        features = self._together(input_ids) if self.shared else self._read(input_ids)
        assert features is not None
        return features if self.cache is None else self._stored(input_ids, lengths, features)

    def join(self) -> None:
        """This rank's batch has its features already: help the others with theirs."""
        if self.shared:
            self._together(None)

    def finish(self) -> None:
        """This rank has no more batches: help the others until none has any, and write what is to be cached."""
        while self.shared and self._together(None, done=True) is not None:
            pass
        if self.cache is not None:
            self.cache.flush()

    def _together(self, input_ids: Tensor | None, done: bool = False) -> Tensor | None:
        """All ranks' batches in one call of the target, padded to a common width; this rank's features, None where
        every rank is done."""
        ids = torch.zeros(0, 0, dtype=torch.int64, device=self._target.device) if input_ids is None else input_ids
        own = torch.tensor([*ids.shape, done], device=ids.device)
        shapes = [torch.zeros_like(own) for _ in range(num_ranks())]
        dist.all_gather(shapes, own)
        rows, widths, finished = torch.stack(shapes).T.tolist()
        if all(finished):
            return None
        if not any(rows):
            return ids
        padded = ids.new_zeros(max(rows), max(widths))
        padded[: ids.shape[0], : ids.shape[1]] = ids
        parts = [torch.empty_like(padded) for _ in range(num_ranks())]
        dist.all_gather(parts, padded)
        features = self._read(torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]))
        start = sum(rows[: rank()])
        return features[start : start + ids.shape[0], : ids.shape[1]]

    def _read(self, input_ids: Tensor) -> Tensor:
        return self._target.features(input_ids.to(self._target.device), capture=self._capture).to(input_ids.device)

    def _stored(self, input_ids: Tensor, lengths: Sequence[int], features: Tensor) -> Tensor:
        assert self.cache is not None
        stored = torch.zeros_like(features, dtype=torch.bfloat16)
        for ids, length, row, own in zip(input_ids.cpu(), lengths, features, stored, strict=True):
            own[:length] = self.cache.put(ids[:length], row[:length])
        return stored
