"""`draftsmith train NAME` and `draftsmith train acceptance`: from the options of a training to its head."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from draftsmith.data.engines.own import set_threads
from draftsmith.data.settings import with_dtype
from draftsmith.data.store.writer import writing_alone
from draftsmith.modules.formats import MTP
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.stitch import ships_mtp
from draftsmith.train import plan
from draftsmith.train.config import TrainAcceptanceConfig, TrainDrafterConfig
from draftsmith.train.prepare import TrainedConfig, prepare, with_shape
from draftsmith.train.strategies import device_kind, resolve_precision


def run(config: TrainedConfig) -> Path | None:
    """Train a head and return its directory, output/best; with --plan print what that takes.

    Raises:
        InputError: the data does not fit the models, is damaged or empty, the output is taken, or the disk cannot hold
            what the training writes.
    """
    since = time.monotonic()
    set_threads(config.num_threads)
    target = None
    if isinstance(config, TrainDrafterConfig):
        target = Checkpoint(config.target, config.trust_remote_code)
        trained = config.init != "random" or (config.kind == MTP and ships_mtp(target))
        config = resolve_precision(with_shape(config, target.shape).by_start(trained))
        config = with_dtype(config, target, device_kind(config))
        if config.plan:
            plan.show(config, target)
            return None
    with writing_alone(config.output, shared=True):
        return train(config, target, since)


def train(config: TrainedConfig, target: Checkpoint | None, since: float) -> Path:
    """Train a head in its output directory, which this process holds. target: of a drafter."""
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.acceptance import read_model, with_shape
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.tracking import check_loggers

    if isinstance(config, TrainAcceptanceConfig):
        config = resolve_precision(with_shape(config))
        model = Checkpoint(read_model(config), config.trust_remote_code)
        config = with_dtype(config, model, device_kind(config))
    done = finished(config)
    if done is not None:
        return done
    # Its errors come before anything is loaded.
    check_loggers(config)
    if isinstance(config, TrainDrafterConfig):
        assert target is not None
        plan.check_space(config, target.shape)
    with ExitStack() as clients:
        return fit(*prepare(config, clients, target), since=since)
