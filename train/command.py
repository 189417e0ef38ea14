"""`draftsmith train NAME` and `draftsmith train acceptance`: from the options of a training to its head."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.data.console import log_note
from draftsmith.data.engines.own import set_threads
from draftsmith.data.heads.diagnosis import bad_numbers, diagnose
from draftsmith.data.store.writer import writing_alone
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.llama import OuterLM
from draftsmith.train import plan
from draftsmith.train.config import TrainAcceptanceConfig, TrainDrafterConfig
from draftsmith.train.metrics import rank
from draftsmith.train.prepare import TrainedConfig, prepare, with_shape
from draftsmith.train.strategies import resolve_precision

if TYPE_CHECKING:
    from draftsmith.train.data import HeadDataModule
    from draftsmith.train.module import LitHead

# Validation texts that a diagnosis reads, which takes seconds.
DIAGNOSED = 64
# Of a training whose head is diagnosed; shorter ones only try whether it runs.
LEAST_STEPS = 20


def run(config: TrainedConfig) -> Path | None:
    """Train a head and return its directory, output/best; with --plan print what that takes.

    Raises:
        InputError: the data does not fit the models, is damaged or empty, the output is taken, or the disk cannot hold
            what the training writes.
    """
    since = time.monotonic()
    set_threads(config.num_threads)
    if isinstance(config, TrainDrafterConfig):
        config = resolve_precision(with_shape(config))
        if config.plan:
            plan.show(config)
            return None
    with writing_alone(config.output, shared=True):
        return train(config, since)


def train(config: TrainedConfig, since: float) -> Path:
    """Train a head in its output directory, which this process holds."""
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.acceptance import with_defaults
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.tracking import check_loggers

    if isinstance(config, TrainAcceptanceConfig):
        config = resolve_precision(with_defaults(config))
    done = finished(config)
    if done is not None:
        return done
    # Its errors come before anything is loaded.
    check_loggers(config)
    if isinstance(config, TrainDrafterConfig):
        plan.check_space(config)
    with ExitStack() as clients:
        module, data = prepare(config, clients)
        best = fit(module, data, since=since)
    if isinstance(config, TrainDrafterConfig) and not config.drafter.saved_as_model and rank() == 0:
        explain(best, config, module, data)
    return best


def explain(best: Path, config: TrainDrafterConfig, module: LitHead, data: HeadDataModule) -> None:
    """Warn if the trained head's metrics are bad, with a diagnosis on some validation samples."""
    from draftsmith.train.module import LitDrafter

    assert isinstance(module, LitDrafter)
    warning = bad_numbers(read_object(best / "manifest.json", {"metrics": dict})["metrics"])
    if not warning:
        return
    # Of a target elsewhere there is nothing to read with, a smoke test has nothing to explain, and --minutes are over.
    if isinstance(module.target, OuterLM) or module.total_steps < LEAST_STEPS or config.minutes:
        warning += f". See why: draftsmith diagnose {best} --data {config.data} --target {config.target}"
    else:
        # Whole texts: an answer in a piece of one has lost its context.
        val = data.val
        texts = itertools.islice(val.dataset.whole_texts(val.indices), DIAGNOSED)
        rows = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist()} for ids, mask in texts]
        warning += f"\n{diagnose(best, module.target, config.target, rows, val.dataset.manifest)}"
    log_note(f"warning: {warning}")
