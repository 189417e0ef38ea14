"""Models and data of any head's training, from its settings."""

from __future__ import annotations

from typing import Any

from draftsmith.train import acceptance, drafter
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import TrainDrafterConfig

TrainedConfig = TrainAcceptanceConfig | TrainDrafterConfig


def prepare(config: TrainedConfig) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun."""
    return acceptance.prepare(config) if isinstance(config, TrainAcceptanceConfig) else drafter.prepare(config)
