"""A run of training in its output directory: begun, resumed, interrupted or finished.

`started.json` is written first and holds what decides the weights. `training.json` is written last and holds the
result: a run that has one is complete.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from torch import nn

from draftsmith.data.console import print_text
from draftsmith.data.store.manifest import decisive, resolved
from draftsmith.data.store.writer import writing_alone
from draftsmith.data.text.answers import Supervision
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.heads import head_fields, made_with, save_head
from draftsmith.modules.pretrained.provenance import differences, flatten
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError
from draftsmith.train.callbacks import (
    Progress,
    Save,
    SaveHead,
    StopOnSignal,
    Validate,
    exit_code,
    judge,
    mismatch,
)
from draftsmith.train.checkpoints import FOLDER, Checkpoints, newest_intact, step_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import HeadDataModule
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.module import IN_PYTHON, LitHead, Provenance
from draftsmith.train.optimizers import TimeLimit
from draftsmith.train.strategies import tensor_cores, trainer_arguments, world_size
from draftsmith.train.tracking import make_loggers

STARTED, FINISHED, RESOLVED = "started.json", "training.json", "config.yaml"
# Flags of Lightning's Trainer that an option decides.
OPTION_OF_FLAG = {
    "accelerator": "accelerator",
    "accumulate_grad_batches": "accumulate",
    "check_val_every_n_epoch": "val_every",
    "default_root_dir": "output",
    "devices": "devices",
    "gradient_clip_val": "clip",
    "log_every_n_steps": "log_every",
    "max_epochs": "epochs",
    "max_steps": "max_steps",
    "max_time": "minutes",
    "num_nodes": "devices (or a launcher)",
    "plugins": "strategy",
    "precision": "precision",
    "strategy": "strategy",
    "val_check_interval": "val_every",
}


def finished(config: TrainConfig) -> Path | None:
    """Return best/ of a run that is finished; None if there is something to train.

    Raises:
        InputError: the output directory holds a run with other settings.
    """
    if (config.output / STARTED).exists():
        _check_begun(config, {"config": decisive(config)})
    if not (config.output / FINISHED).exists():
        return None
    if not (config.output / "best").is_dir():
        found = f"{config.output}, a finished training whose best/ is gone"
        raise InputError("output", found, "best/, its head", "Choose another output, or take last/.")
    say_on_rank_zero(f"{config.output} holds a finished training: nothing is left to do, and nothing is changed")
    return config.output / "best"


def fit(
    module: LitHead,
    data: HeadDataModule,
    callbacks: Sequence[pl.Callback] = (),
    *,
    since: float | None = None,
    **trainer_flags: Any,
) -> Path:
    """Train a head, or resume its training, in `module.config.output`, and return best/.

    callbacks, trainer_flags: callbacks and flags of Lightning's Trainer, beside ours; a logger is added to ours. since:
    value of `time.monotonic` from which --minutes count; None: now.

    Raises:
        InputError: the run to be resumed was begun with other settings or data, or the disk took no head; or an option
            of `draftsmith.settings` takes the place of a flag.
        SystemExit: 130 after Ctrl-C and 143 after SIGTERM, as a shell reports them; everything is saved by then. After
            SIGUSR1 0 if SLURM starts the job again (`exit_code`), else 138.
    """
    config = module.config
    for name in OPTION_OF_FLAG.keys() & trainer_flags.keys():
        remedy = f"Leave it out, and pass {OPTION_OF_FLAG[name]} to draftsmith.settings."
        raise InputError(name, trainer_flags[name], "an option in its place", remedy)
    if config.output == Path(IN_PYTHON):
        raise InputError("output", "none", "a directory for the run", "Pass output to draftsmith.settings.")
    with writing_alone(config.output, shared=True):
        return finished(config) or _fit(module, data, callbacks, since, trainer_flags)


def _fit(
    module: LitHead,
    data: HeadDataModule,
    callbacks: Sequence[pl.Callback],
    since: float | None,
    flags: dict[str, Any],
) -> Path:
    config, provenance = module.config, module.provenance(data)
    module.probe = module.tau_probe(data)
    state = {
        "config": decisive(config),
        "inputs": provenance.inputs,
        "models": provenance.models,
        "read_model": provenance.read_model,
    }
    begun = (config.output / STARTED).exists()
    if begun:
        _check_begun(config, state)
    checkpoint = newest_intact(config.output / FOLDER, say_on_rank_zero)
    step = step_of(checkpoint)
    supervision = Supervision.of(data.train.dataset.answer_lengths(data.train.indices))
    say_on_rank_zero("\n".join(filter(None, (f"data: {supervision.text()}", supervision.warning()))))
    make_directory(config.output)
    if rank() == 0 and not begun:
        text = yaml.safe_dump(resolved(config), sort_keys=False)
        write_text(config.output / RESOLVED, f"# draftsmith train {provenance.job} --config THIS_FILE\n{text}")
        write_json(config.output / STARTED, flatten(state))

    # Callbacks and loggers.
    checkpoints = Checkpoints(config.keep, {"world_size": world_size(config), "strategy": config.strategy})
    val_every = config.val_every or data.order.steps_per_epoch
    versions = made_with()
    save_head = _head_saver(config, provenance, data, dataclasses.asdict(supervision), versions)
    save = Save(config, save_head, checkpoints)
    made_from = {name: value for name, value in dataclasses.asdict(provenance).items() if name != "job"}
    loggers = make_loggers(config, provenance.job, step, say_on_rank_zero, made_from | versions)
    given = flags.pop("logger", None) or []
    if step:
        of_all = "" if config.minutes else f" of {data.total_steps}"
        say_on_rank_zero(f"resuming at step {step}{of_all}")

    if config.minutes:
        module.state.time_limit = TimeLimit(config.minutes, since)
    with quiet(), tensor_cores(config):
        arguments = trainer_arguments(config)
        arguments["plugins"].append(checkpoints)
        if module.validates_first:
            arguments["num_sanity_val_steps"] = -1
        # Lightning refuses these callbacks where their flags are off.
        kinds = {"checkpointing": Checkpoint, "progress_bar": ProgressBar, "model_summary": ModelSummary}
        for name, kind in kinds.items():
            arguments[f"enable_{name}"] = any(isinstance(callback, kind) for callback in callbacks)
        trainer = pl.Trainer(
            **(arguments | flags),
            max_steps=data.total_steps,
            val_check_interval=val_every,
            logger=[*loggers, *(given if isinstance(given, list) else [given])],
            callbacks=[StopOnSignal(), Validate(val_every), Progress(config), save, *callbacks],
            default_root_dir=config.output,
        )
        # weights_only: a checkpoint is a path that the user passes, so it is read as tensors and plain values only.
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)

    return _conclude(module, trainer, save, provenance.job)


def _conclude(module: LitHead, trainer: pl.Trainer, save: Save, job: str) -> Path:
    """Record that a run is complete, and return best/; or say how to resume one that was interrupted.

    Raises:
        InputError, SystemExit: as `fit`.
    """
    config = module.config
    # An interrupted run says how to resume it.
    interrupted = module.signal_agreed or module.signal_received
    if interrupted and trainer.global_step < module.total_steps:
        command = ["draftsmith", "train", job, "--config", str(config.output / RESOLVED)]
        saved = f"saved step {save.saved_step}" if save.saved_step else "nothing was saved"
        again = "the same script" if config.data == Path(IN_PYTHON) else shlex.join(command)
        say_on_rank_zero(f"{signal.Signals(interrupted).name}: {saved}. Resume with: {again}")
        raise SystemExit(exit_code(interrupted))
    if save.unsaved:
        found = f"no room for the trained head ({save.unsaved})"
        remedy = f"Free some space, then run the same command: step {save.saved_step} is saved."
        raise InputError("output", found, "room for best/, last/ and a checkpoint", remedy)

    # The run is complete.
    best, latest, verdict = module.state.best, module.state.latest, judge(module)
    if rank() == 0:
        result = {"steps": trainer.global_step, "best": best, "last": latest, "verdict": verdict}
        write_json(config.output / FINISHED, result)
    trainer.strategy.barrier("finished")
    if rank() == 0:
        print_text(f"{job} head: {config.output / 'best'} (step {best.get('step', 0):.0f})")
        for line in filter(None, (verdict, mismatch(latest))):
            print_text(line)
    # A signal in the last step: the training is complete, but nothing more was wanted.
    if interrupted in {signal.SIGINT, signal.SIGTERM}:
        raise SystemExit(128 + interrupted)
    return config.output / "best"


@contextmanager
def quiet() -> Iterator[None]:
    """Hide messages and warnings of Lightning and DeepSpeed."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # On any machine with SLURM it asks for srun; our processes are started by `draftsmith launch`.
        warnings.filterwarnings("ignore", message="The `srun` command is available")
        # Metrics are those of all ranks already.
        harmless = "It is recommended to use `self.log|You have overridden `transfer_batch"
        warnings.filterwarnings("ignore", message=harmless)
        # torch's pytrees, and collectives that DeepSpeed calls by their old names.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.|torch\.distributed\.")
        yield


def _check_begun(config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Raise InputError with every entry of these parts of started.json that differs from those of the run to resume."""
    remedy = "Restore it, or choose another output."
    begun = read_object(config.output / STARTED, {}, remedy)
    flat = flatten(state)
    if differing := differences(flat, {key: value for key, value in begun.items() if key.split(".")[0] in state}):
        found = "another " + "; ".join(f"{key}: {now}, begun with {was}" for key, now, was in differing)
        remedy = f"Restore it (see {config.output / RESOLVED}), or choose another output."
        raise InputError("output", found, "the settings and data that the run was begun with", remedy)


def _head_saver(
    config: TrainConfig,
    provenance: Provenance,
    data: HeadDataModule,
    supervision: Mapping[str, float],
    versions: Mapping[str, Any],
) -> SaveHead:
    """Return a function that saves a head under output/NAME, with its manifest and model card."""
    parts = {"training": data.train.lengths, "validation": data.val.lengths}
    samples: dict[str, dict[str, float]] = {
        name: {"samples": len(lengths), "tokens": int(sum(lengths))} for name, lengths in parts.items()
    }
    samples["training"] |= supervision

    def save(head: nn.Module, name: str, step: int, metrics: Mapping[str, float]) -> None:
        manifest = {
            "target": provenance.read_model,
            "models": provenance.models,
            "sampling": provenance.sampling,
            **provenance.labels,
            "inputs": provenance.inputs,
            "tied_to_target": list(provenance.tied_to_target),
            "samples": samples,
            "config": resolved(config),
            "options": decisive(config),
            "seed": config.seed,
            "step": step,
            "metrics": dict(metrics),
            **versions,
        }
        card = model_card(provenance.job, {"head": head_fields(head), **manifest})
        save_head(config.output / name, head, manifest, card)

    return save
