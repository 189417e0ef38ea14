"""`draftsmith train KIND`: a training, and a diagnosis of its head if the head's numbers are bad."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.config import TrainDrafterConfig
    from draftsmith.train.data import HeadDataModule
    from draftsmith.train.module import LitDrafter
    from draftsmith.train.prepare import TrainedConfig

# Validation texts that a diagnosis reads, which takes seconds.
DIAGNOSED = 64
# Of a training whose head is diagnosed; shorter ones only try whether it runs.
LEAST_STEPS = 20


def run(config: TrainedConfig) -> Path | None:
    """Train a head, as `train.command.run`, and explain bad numbers.

    Raises:
        InputError: the packages of the extra `train` are not installed.
    """
    if missing := [name for name in ("lightning", "wandb") if find_spec(name) is None]:
        found = f"no {' and no '.join(missing)}"
        raise InputError("train", found, "the extra `train`", "Run: pip install 'draftsmith[train]'")
    from draftsmith.train.command import run as train

    return train(config, explain)


def explain(best: Path, config: TrainDrafterConfig, module: LitDrafter, data: HeadDataModule) -> None:
    """Warn if the trained head's metrics are bad, with a diagnosis on some validation samples."""
    from draftsmith.data.console import log_note
    from draftsmith.eval.diagnose.diagnosis import bad_numbers, diagnose
    from draftsmith.modules.pretrained.reading import read_object
    from draftsmith.modules.targets.outer import OuterLM

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
