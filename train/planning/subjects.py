"""The trainings that can be planned, as a dry run makes them: the real module on models without weights, and samples of
any length without content. A learned drafter's is one class, whatever the drafter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.data.acceptance import AcceptanceConfig
from draftsmith.data.heads.directory import class_of, head_settings, kind_at
from draftsmith.data.heads.frozen_drafter import FrozenDrafter
from draftsmith.data.rollouts import CHILD_FIELDS, FIELDS
from draftsmith.data.store.datasets import Item, collate_acceptance, collate_features, pack_features
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.data.store.rollout_dataset import collate_rollouts
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.train.acceptance import TrainAcceptanceConfig, acceptance_settings, check_labels, filled, labels_of
from draftsmith.train.acceptance_objective import AcceptanceObjective
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.drafted_tokens import MixedText, RolloutDrafts
from draftsmith.train.drafter import head_shape, target_shape
from draftsmith.train.drafter_objective import DrafterObjective
from draftsmith.train.lit_head import Objective
from draftsmith.train.planning.frozen import FrozenModel
from draftsmith.train.telemetry import features_flops


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within are of this type; fake ones cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _answered(length: int, counted: int) -> Item:
    return {"input_ids": torch.zeros(length, dtype=torch.int64), "loss_mask": torch.arange(length) >= length - counted}


class DrafterTraining:
    """A drafter on a target's features. stored: they come with the data; else the target makes them in the step.

    job: kind of the head. kind: of the data, where there are none yet. feature_size: elements of a token's features.
    """

    kind = "responses"

    def __init__(self, config: TrainDrafterConfig, target: FrozenModel):
        self.config, self.frozen, self.job = config, target, config.kind
        self.lookahead = config.drafter.lookahead
        self._shape = head_shape(config, target.llama or target_shape(config.target))
        self.stored = (config.data / MANIFEST).exists() and Manifest.read(config.data).kind == "features"
        self.feature_size = 0
        if config.drafter.needs_features:
            self.feature_size = target.hidden_size * max(1, len(config.drafter.capture(target.num_layers)))

    @property
    def context(self) -> int:
        """Most tokens of a document: a head to fine-tune may reach less far than the target."""
        return min(self.frozen.context, self._shape.max_position)

    @property
    def packed(self) -> bool:
        """Batches have no padding."""
        return bool(self.config.tokens_per_batch)

    def head(self) -> DraftHead:
        return self.config.drafter(self._shape)

    def objective(self, target: CausalLM) -> Objective:
        return DrafterObjective(self.config.drafter, self.config, target)

    def read_flops(self, target: CausalLM, lengths: Sequence[int], epochs: float) -> float:
        """FLOPs of the target's forward in an epoch, on average over so many."""
        if self.stored or not self.feature_size:
            return 0.0
        # A cache is filled in the first epoch and read in the others.
        return features_flops(target, lengths) * (min(1.0, 1 / epochs) if self.config.features == "cache" else 1.0)

    def item(self, length: int, counted: int, read: bool = False) -> Item:
        item = _answered(length, counted) | {"position_ids": torch.arange(length)}
        if self.feature_size and (self.stored or read):
            item["features"] = torch.empty(length, self.feature_size, dtype=torch.bfloat16)
        return item

    def collate(self, items: Sequence[Item]) -> Any:
        return (pack_features if self.config.tokens_per_batch else collate_features)(items)


class AcceptanceTraining:
    """An acceptance head on the states of a frozen drafter, which reads in every step."""

    job, lookahead, feature_size = "acceptance", 0, 0

    def __init__(self, config: TrainAcceptanceConfig, model: FrozenModel):
        """model: the draft, or the model that a head drafts for."""
        self.config, self.frozen = filled(config), model
        self.kind, manifest = labels_of(config)
        self._settings = acceptance_settings(config, model.hidden_size)
        if manifest is not None:
            check_labels(self._settings, self.kind, manifest)
        made = manifest.config if manifest is not None else {}
        # Where there are no labels yet, as they are made if nothing else is asked for.
        self._depth, self._children = made.get("depth", AcceptanceConfig.depth), made.get("children", 1)

    @property
    def context(self) -> int:
        """Drafts follow all of their text, which is not split."""
        return sys.maxsize if self.kind == "rollouts" else self.frozen.context

    @property
    def packed(self) -> bool:
        """Texts are read one by one, and drafts have no padding; mixed text has some."""
        return self.kind == "rollouts"

    def read_flops(self, model: CausalLM, lengths: Sequence[int], epochs: float) -> float:
        """None: what a drafter reads is part of every step."""
        return 0.0

    def head(self) -> AcceptanceHead:
        return AcceptanceHead(self._settings)

    def objective(self, model: CausalLM) -> Objective:
        head, kind = None, kind_at(self.config.drafter)
        if kind is not None:
            with default_dtype(model.dtype):
                head = class_of(kind)(head_settings(self.config.drafter, kind))
        drafter = FrozenDrafter(model, {}, head)
        if self.kind == "acceptance":
            return AcceptanceObjective(MixedText(drafter, greedy=False), "none")
        return AcceptanceObjective(RolloutDrafts(drafter, self._settings, self._depth), "none")

    def item(self, length: int, counted: int, read: bool = False) -> Item:
        if self.kind == "acceptance":
            item = _answered(length, round(counted * (1 - (self.config.mix or 0))))
            labels = {name: torch.zeros(length) for name in ("accept_prob", "log_q", "overlap")}
            return {"z_ids": item["input_ids"], "loss_mask": item["loss_mask"], **labels}
        return self._drafts(length, counted)

    def _drafts(self, length: int, counted: int) -> Item:
        """A text and the drafts at its end: `RolloutDataset`'s fields."""
        drafts = max(1, counted // self._depth)
        text = max(length - drafts * self._depth, 2)
        sizes = {"T": text, "S": drafts, "K": self._depth, "C": self._children}
        item: Item = {"loss_mask": torch.ones(drafts, self._depth, dtype=torch.bool)}
        for spec in (*FIELDS, *CHILD_FIELDS):
            if spec.dtype in ("list<int32>", "list<float32>"):
                shape = [sizes[name] for name in spec.shape[0].split("*")]
                item[spec.name] = torch.zeros(shape, dtype=torch.int64 if "int" in spec.dtype else torch.float32)
        item["weight"] = item.pop("reached")
        item["starts"] += text
        return item

    def collate(self, items: Sequence[Item]) -> Any:
        return (collate_rollouts if self.kind == "rollouts" else collate_acceptance)(items)
