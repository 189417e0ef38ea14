"""`draftsmith train acceptance` and `draftsmith train NAME`: from the settings of a training to its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.data.answering.batched import set_threads
from draftsmith.data.store.writer import sole_writer
from draftsmith.train import acceptance, drafter
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.drafter import TrainDrafterConfig, drafter_config

__all__ = ["TrainAcceptanceConfig", "drafter_config", "prepare", "run"]
TrainedConfig = TrainAcceptanceConfig | TrainDrafterConfig


@sole_writer(shared=True)
def run(config: TrainedConfig) -> Path:
    """Train the head; returns its directory, output/best.

    Raises:
        InputError: the data does not fit the models, is damaged or empty, the output is taken, or the disk cannot hold
            what the training writes.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.planning.plan import announce

    set_threads(config.num_threads)
    if isinstance(config, TrainAcceptanceConfig):
        config = acceptance.filled(config)
    done = finished(config)
    if done is not None:
        return done
    announce(config)
    return fit(*prepare(config))


def prepare(config: TrainedConfig) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun."""
    return acceptance.prepare(config) if isinstance(config, TrainAcceptanceConfig) else drafter.prepare(config)
