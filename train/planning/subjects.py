"""The trainings that can be planned, as a dry run makes them: the real module on models without weights, and samples of
any length without content. A learned drafter's is one class, whatever the drafter."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from draftsmith.data.acceptance import AcceptanceConfig
from draftsmith.data.heads.directory import class_of, head_settings, kind_at
from draftsmith.data.heads.frozen_drafter import FrozenDrafter
from draftsmith.data.models.loading import target_shape
from draftsmith.data.store.datasets import Item, collate_acceptance, collate_features, pack_features
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.train.acceptance import TrainAcceptanceConfig, acceptance_settings, check_labels, filled, labels_of
from draftsmith.train.acceptance_objective import AcceptanceObjective
from draftsmith.train.config import TrainConfig, TrainDrafterConfig
from draftsmith.train.data_module import Key, Part
from draftsmith.train.drafted_tokens import MixedText, RolloutDrafts
from draftsmith.train.drafter import head_shape
from draftsmith.train.drafter_objective import DrafterObjective, FeatureSource
from draftsmith.train.lit_head import Objective
from draftsmith.train.planning.frozen import FrozenModel, frozen_model
from draftsmith.train.stored_tokens import BLOCK, StoredDrafts, StoredTokens
from draftsmith.train.strategies import model_dtype


class PlannedTraining(ABC):
    """A training that is planned.

    job: kind of the head. kind: of the data, where there are none yet. frozen: the model that reads the data. context:
    most tokens of a document: longer ones are split. lookahead: tokens that their pieces share. packed: batches have no
    padding. counted: share of the answers' tokens that the loss counts. feature_size: elements of a token's features,
    stored: they come with the data; else the target makes them in the step. head: makes one with random weights.
    objective: what it learns of `frozen`, as that was made in the dry run. samples: makes a batch of samples without
    content, of so many tokens each, of which the last ones count in the loss; with features, or without. loss_tokens:
    of such a batch, as the training counts them.
    """

    job: str
    kind: str
    frozen: FrozenModel
    context: int
    packed: bool
    lookahead = 0
    counted = 1.0
    feature_size = 0
    stored = False

    @abstractmethod
    def head(self) -> nn.Module: ...

    @abstractmethod
    def objective(self, model: CausalLM) -> Objective: ...

    @abstractmethod
    def samples(self, lengths: Sequence[int], counts: Sequence[int], stored: bool) -> Any: ...

    @abstractmethod
    def loss_tokens(self, data: Any) -> int: ...

    def documents(self, lengths: Sequence[int]) -> list[int]:
        """Tokens of each sample of the training, by those of each of the data."""
        return list(lengths)

    def part(self, lengths: Sequence[int], loss_share: float, stored: bool | None = None) -> Part:
        """A part of a step: documents of these lengths, of whose tokens a share is of answers."""
        counts = [round(length * loss_share * self.counted) for length in lengths]
        keys = tuple(Key(0, number) for number in range(len(lengths)))
        data = self.samples(lengths, counts, self.stored if stored is None else stored)
        return Part(data, keys, sum(counts), sum(counts), True, True)


def planned_training(config: TrainConfig) -> PlannedTraining:
    """Raises:
    InputError: a model that is none, or of a family that the head cannot take its layer from."""
    if isinstance(config, TrainDrafterConfig):
        return PlannedDrafter(config)
    assert isinstance(config, TrainAcceptanceConfig)
    return PlannedAcceptance(config)


class PlannedDrafter(PlannedTraining):
    """A drafter on a target's features."""

    kind = "responses"

    def __init__(self, config: TrainDrafterConfig):
        drafter, frozen = config.drafter, frozen_model(config.target, model_dtype(config))
        self.config, self.job, self.frozen, self.lookahead = config, config.kind, frozen, drafter.lookahead
        self._shape = head_shape(config, frozen.llama or target_shape(config.target))
        self._layers = drafter.learns_from(self._shape, frozen.info.num_layers)
        # A head to fine-tune may reach less far than the target.
        self.context = min(frozen.info.max_position, self._shape.max_position)
        self.packed = bool(config.tokens_per_batch)
        self.stored = (config.data / MANIFEST).exists() and Manifest.read(config.data).kind == "features"
        if drafter.needs_features:
            self.feature_size = frozen.info.hidden_size * max(1, len(self._layers))

    def head(self) -> nn.Module:
        head = self.config.drafter(self._shape)
        head.freeze(self.config)
        return head

    def objective(self, model: CausalLM) -> Objective:
        source = FeatureSource(model, self._layers)
        return DrafterObjective(self.config.drafter, self.config, model, source=source)

    def samples(self, lengths: Sequence[int], counts: Sequence[int], stored: bool) -> Any:
        items = []
        for length, count in zip(lengths, counts, strict=True):
            items.append(_answered("input_ids", length, count) | {"position_ids": torch.arange(length)})
            if self.feature_size and stored:
                items[-1]["features"] = torch.empty(length, self.feature_size, dtype=torch.bfloat16)
        return (pack_features if self.packed else collate_features)(items)

    def loss_tokens(self, data: Any) -> int:
        return int(self.config.drafter.loss_count(data, self.config))


class PlannedAcceptance(PlannedTraining):
    """An acceptance head on the states of a frozen drafter, which reads in every step; or, of real rounds, before the
    first one."""

    job = "acceptance"

    def __init__(self, config: TrainAcceptanceConfig):
        self.config, self.frozen = filled(config), frozen_model(config.read_model, model_dtype(config))
        self.kind, manifest = labels_of(config)
        self._settings = acceptance_settings(config, self.frozen.info.hidden_size)
        if manifest is not None:
            check_labels(self._settings, self.kind, manifest)
        made = manifest.config if manifest is not None else {}
        # Where there are no labels yet, as they are made if nothing else is asked for.
        self._depth = made.get("depth", AcceptanceConfig.depth)
        # Texts of rollouts are read one by one, and not split: their drafts follow all of them.
        self.packed = self.kind == "rollouts"
        self._num_stored, self._dtype = 0, torch.float32
        self.context = sys.maxsize if self.packed else self.frozen.info.max_position
        self.counted = 1 - (self.config.mix or 0)

    def head(self) -> nn.Module:
        return AcceptanceHead(self._settings)

    def objective(self, model: CausalLM) -> Objective:
        head, kind = None, kind_at(self.config.drafter)
        if kind is not None:
            with default_dtype(model.dtype):
                head = class_of(kind)(head_settings(self.config.drafter, kind))
        drafter = FrozenDrafter(model, {}, head)
        if self.kind == "acceptance":
            return AcceptanceObjective(MixedText(drafter, greedy=False), "none")
        self._dtype = model.dtype
        reader = StoredDrafts(RolloutDrafts(drafter, self._settings, self._depth))
        self._stored = self._tokens(self._num_stored)  # beside the drafter for the whole training
        return AcceptanceObjective(reader, "none")

    def documents(self, lengths: Sequence[int]) -> list[int]:
        if not self.packed:
            return list(lengths)
        self._num_stored = sum(lengths)
        blocks, rest = divmod(self._num_stored, BLOCK)
        return [BLOCK] * blocks + [rest] * (rest > 0)

    def samples(self, lengths: Sequence[int], counts: Sequence[int], stored: bool) -> Any:
        if self.packed:
            return self._tokens(sum(lengths))
        return collate_acceptance([_mixed(length, count) for length, count in zip(lengths, counts, strict=True)])

    def loss_tokens(self, data: Any) -> int:
        return int(data.loss_mask.sum())

    def _tokens(self, count: int) -> StoredTokens:
        """So many drafted tokens without content."""
        hidden = torch.empty(count, self.frozen.info.hidden_size, dtype=self._dtype)
        numbers = (torch.empty(count, len(self._settings.features)), *(torch.zeros(count) for _ in range(3)))
        ids = torch.zeros(count, dtype=torch.int64)
        features, log_q, accept_prob, weight = numbers
        counted = torch.ones(count, dtype=torch.bool)
        return StoredTokens(hidden, ids, features, log_q, accept_prob, weight, ids, counted)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within are of this type; fake ones cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _answered(ids: str, length: int, counted: int) -> Item:
    return {ids: torch.zeros(length, dtype=torch.int64), "loss_mask": torch.arange(length) >= length - counted}


def _mixed(length: int, counted: int) -> Item:
    labels = {name: torch.zeros(length) for name in ("accept_prob", "log_q", "overlap")}
    return _answered("z_ids", length, counted) | labels
