"""`draftsmith train acceptance` and `draftsmith train NAME`: from the settings of a training to its head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.data.engines.own import set_threads
from draftsmith.data.store.writer import sole_writer
from draftsmith.train.acceptance import TrainAcceptanceConfig, with_defaults, with_size
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.drafter import explain
from draftsmith.train.plan import announce
from draftsmith.train.prepare import TrainedConfig, prepare
from draftsmith.train.strategies import settled

if TYPE_CHECKING:
    from draftsmith.train.lit_drafter import LitDrafter


@sole_writer(shared=True)
def run(config: TrainedConfig, learner: type[LitDrafter] | None = None) -> Path:
    """Train the head; returns its directory, output/best. learner: of a drafter, a `LitDrafter` with its own loss.

    Raises:
        InputError: the data does not fit the models, is damaged or empty, the output is taken, or the disk cannot hold
            what the training writes.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.metrics import is_first_process

    set_threads(config.num_threads)
    if isinstance(config, TrainAcceptanceConfig):
        config = with_size(with_defaults(config)) if config.resume else with_defaults(config)
    config = settled(config)
    done = finished(config)
    if done is not None:
        return done
    announce(config)
    prepared = prepare(config, learner)
    best = fit(*prepared)
    if isinstance(config, TrainDrafterConfig) and is_first_process():
        module, data, *_ = prepared
        explain(best, config, module.objective.target, data.val)
    return best
