"""Models and data of any head's training, from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftsmith.train import acceptance, drafter
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import TrainDrafterConfig

if TYPE_CHECKING:
    from draftsmith.train.lit_drafter import LitDrafter

TrainedConfig = TrainAcceptanceConfig | TrainDrafterConfig


def prepare(config: TrainedConfig, learner: type[LitDrafter] | None = None) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun. learner: as of `drafter.prepare`."""
    return acceptance.prepare(config) if isinstance(config, TrainAcceptanceConfig) else drafter.prepare(config, learner)
