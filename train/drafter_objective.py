"""What a drafter learns: its own loss, on features of the target that are stored or computed right before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.packing import documents_of
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.data_module import Part
from draftsmith.train.feature_source import FeatureSource
from draftsmith.train.lit_head import Given, Objective
from draftsmith.train.metrics import Means
from draftsmith.train.telemetry import features_flops


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
        batches that come without; None is the target alone."""
        self.monitor, self.larger_is_better = head_class.monitor, head_class.larger_is_better
        self.settings, self.target, self.feature_std = settings, target, feature_std
        self.reads = head_class.needs_features
        self.source = source or FeatureSource(target, head_class.capture(target.info.num_layers))

    def read(self, part: Part, validating: bool = False) -> Given:
        data = self.features_of(part.data)
        return Given(data, data.features if part.data.features is None else None)  # stored ones were looked at

    def features_of(self, data: FeatureBatch) -> FeatureBatch:
        """The batch with its features: those it came with, or the target's, without gradient and in its own dtype,
        whatever autocast is around it."""
        if data.features is not None or not self.reads:
            self.source.join()
            return data
        assert data.attention_mask is not None
        documents = documents_of(data.lengths, data.input_ids.device)
        if documents is None:
            return dataclasses.replace(data, features=self.source(data.input_ids, data.attention_mask.sum(-1).tolist()))
        features = self.source(documents.side_by_side(data.input_ids), documents.lengths)
        return dataclasses.replace(data, features=documents.end_to_end(features))

    def loss(self, head: DraftHead, given: Given, step: TrainStep) -> LossOutput:
        step = dataclasses.replace(step, feature_std=self.feature_std)
        return head.loss(given.data, self.target, self.settings, step)

    def validate(self, head: DraftHead, given: Iterable[tuple[Part, Given]]) -> dict[str, float]:
        """The means of what the drafter's validation reports: teacher-forced, on response tokens."""
        means = Means()
        for _, own in given:
            means.add(head.validation(own.data, self.target, self.settings))
        self.source.finish()
        metrics = means.take()
        if not metrics:
            raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
        return metrics

    def flops(self, head: DraftHead, part: Part, step: TrainStep) -> float:
        computed = self.reads and part.data.features is None
        online = features_flops(self.target, step.lengths) if computed else 0.0
        return online + head.flops(head.config, self.settings, step, int(part.tokens))

    def end_epoch(self) -> None:
        self.source.flush()
