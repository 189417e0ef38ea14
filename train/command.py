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
from draftsmith.data.store.writer import sole_writer
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.llama import OuterLM
from draftsmith.train.acceptance import TrainAcceptanceConfig, with_defaults
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.metrics import is_first_process
from draftsmith.train.plan import announce
from draftsmith.train.prepare import TrainedConfig, prepare, with_shape
from draftsmith.train.strategies import settled

if TYPE_CHECKING:
    from draftsmith.train.fit import PreparedTraining

# Validation texts that a diagnosis reads, which takes seconds.
DIAGNOSED = 64
# Of a training whose head is diagnosed; shorter ones only try whether it runs.
LEAST_STEPS = 20


@sole_writer(shared=True)
def run(config: TrainedConfig) -> Path:
    """Train a head and return its directory, output/best.

    Raises:
        InputError: the data does not fit the models, is damaged or empty, the output is taken, or the disk cannot hold
            what the training writes.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.loggers import wandb_client

    since = time.monotonic()
    set_threads(config.num_threads)
    if isinstance(config, TrainAcceptanceConfig):
        config = with_defaults(config)
    else:
        config = with_shape(config)
    config = settled(config)
    done = finished(config)
    if done is not None:
        return done
    # Its errors come before anything is loaded.
    wandb_client(config)
    if isinstance(config, TrainDrafterConfig):
        announce(config)
    with ExitStack() as clients:
        training = prepare(config, clients)
        best = fit(training, since)
    if isinstance(config, TrainDrafterConfig) and not config.drafter.is_model and is_first_process():
        explain(best, config, training)
    return best


def explain(best: Path, config: TrainDrafterConfig, training: PreparedTraining) -> None:
    """Warn if the trained head's metrics are bad, with a diagnosis on some validation samples."""
    from draftsmith.train.lit_drafter import LitDrafter

    module = training.module
    assert isinstance(module, LitDrafter)
    warning = bad_numbers(read_object(best / "manifest.json", {"metrics": dict})["metrics"])
    if not warning:
        return
    # Of a target elsewhere there is nothing to read with, a smoke test has nothing to explain, and --minutes are over.
    if isinstance(module.target, OuterLM) or module.total_steps < LEAST_STEPS or config.minutes:
        warning += f". See why: draftsmith diagnose {best} --data {config.data} --target {config.target}"
    else:
        # Whole texts: an answer in a piece of one has lost its context.
        val = training.data.val
        texts = itertools.islice(val.dataset.whole_texts(val.indices), DIAGNOSED)
        rows = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist()} for ids, mask in texts]
        warning += f"\n{diagnose(best, module.target, config.target, rows, val.dataset.manifest)}"
    log_note(f"warning: {warning}")
