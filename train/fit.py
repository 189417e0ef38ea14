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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch import nn

from draftsmith.data.console import print_text
from draftsmith.data.heads.card import model_card
from draftsmith.data.store.manifest import decisive, resolved
from draftsmith.data.text.answers import Supervision
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.heads import head_fields, made_with, save_head
from draftsmith.modules.pretrained.provenance import differences, flatten
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError
from draftsmith.train.callbacks import BetweenSteps, SaveHead
from draftsmith.train.checkpoints import FOLDER, Checkpoints, newest_intact, step_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import HeadDataModule
from draftsmith.train.lit_head import LitHead
from draftsmith.train.loggers import make_loggers
from draftsmith.train.metrics import is_first_process, say_on_rank_zero
from draftsmith.train.signals import StopOnSignal, exit_code
from draftsmith.train.strategies import tensor_cores, trainer_arguments, world_size
from draftsmith.train.tau import TauProbe
from draftsmith.train.telemetry import Telemetry
from draftsmith.train.time_limit import TimeLimit
from draftsmith.train.verdict import mismatch

STARTED, FINISHED, RESOLVED = "started.json", "training.json", "config.yaml"


@dataclass(frozen=True)
class Provenance:
    """Models and data that a head is made from.

    job: kind of the head. inputs: name -> digest of each artefact. read_model: identity of the model whose hidden
    states the head reads. models: identities of all models concerned. sampling: of the answers, or that labels hold
    for, if it is known; labels: their kind, as in the head's config.json. of_target: see `DraftHead`.
    """

    job: str
    inputs: dict[str, str]
    read_model: dict[str, str]
    models: dict[str, Any]
    sampling: dict[str, Any] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    of_target: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedTraining:
    """A training that has not begun: its module and data, and what is recorded of it. probe: measures tau."""

    module: LitHead
    data: HeadDataModule
    config: TrainConfig
    provenance: Provenance
    probe: TauProbe | None = None


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


def fit(training: PreparedTraining, since: float | None = None) -> Path:
    """Train, or resume a training, and return best/.

    since: value of `time.monotonic` from which --minutes count; None: now.

    Raises:
        InputError: the run to be resumed was begun with other settings or data, or the disk took no head.
        SystemExit: 130 after Ctrl-C and 143 after SIGTERM, as a shell reports them; everything is saved by then. After
            SIGUSR1 0 if SLURM starts the job again (train/signals.py), else 138.
    """
    module, data, config, provenance = training.module, training.data, training.config, training.provenance
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
    say_on_rank_zero(f"data: {supervision.text()}")
    if warning := supervision.warning():
        say_on_rank_zero(warning)
    make_directory(config.output)
    if is_first_process() and not begun:
        text = yaml.safe_dump(resolved(config), sort_keys=False)
        write_text(config.output / RESOLVED, f"# draftsmith train {provenance.job} --config THIS_FILE\n{text}")
        write_json(config.output / STARTED, flatten(state))

    # Callbacks and loggers.
    checkpoints = Checkpoints(
        config.keep, {"world_size": world_size(config), "strategy": config.strategy}, config.accumulate
    )
    val_every = config.val_every or data.order.steps_per_epoch
    versions = made_with()
    save_head = _head_saver(config, provenance, data, dataclasses.asdict(supervision), versions)
    between = BetweenSteps(config, val_every, save_head, checkpoints, training.probe)
    made_from = {name: value for name, value in dataclasses.asdict(provenance).items() if name != "job"}
    loggers = make_loggers(config, provenance.job, step, say_on_rank_zero, made_from | versions)
    if step:
        say_on_rank_zero(f"resuming at step {step}" + ("" if config.minutes else f" of {module.total_steps}"))

    if config.minutes:
        module.time_limit = TimeLimit(config.minutes, since)
    with quiet(), tensor_cores(config):
        arguments = trainer_arguments(config)
        arguments["plugins"].append(checkpoints)
        trainer = pl.Trainer(
            **arguments,
            max_steps=data.total_steps,
            logger=loggers,
            callbacks=[between.telemetry, between, StopOnSignal()],
            default_root_dir=config.output,
        )
        # weights_only: a checkpoint is a path that the user passes, so it is read as tensors and plain values only.
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)

    # An interrupted run says how to resume it.
    interrupted = module.signal_agreed or module.signal_received
    if trainer.global_step < module.total_steps:
        assert interrupted, f"stopped at step {trainer.global_step} of {module.total_steps} without a signal"
        command = ["draftsmith", "train", provenance.job, "--config", str(config.output / RESOLVED)]
        saved = f"saved step {between.saved_step}" if between.saved_step else "nothing was saved"
        say_on_rank_zero(f"{signal.Signals(interrupted).name}: {saved}. Resume with: {shlex.join(command)}")
        raise SystemExit(exit_code(interrupted))
    if between.unsaved:
        found = f"no room for the trained head ({between.unsaved})"
        remedy = f"Free some space, then run the same command: step {between.saved_step} is saved."
        raise InputError("output", found, "room for best/, last/ and a checkpoint", remedy)

    # The run is complete.
    if is_first_process():
        said = between.verdict(module)
        result = {"steps": module.total_steps, "best": between.best, "last": between.latest, "verdict": said}
        write_json(config.output / FINISHED, result)
    trainer.strategy.barrier("finished")
    if is_first_process():
        print_text(f"{provenance.job} head: {config.output / 'best'} (step {between.best.get('step', 0):.0f})")
        for line in filter(None, (said, mismatch(between.latest))):
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
        # A LitDrafter has hooks for a plain Trainer, which ours does not call.
        warnings.filterwarnings("ignore", message="You defined a `validation_step`|You have overridden `transfer_batch")
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
            "of_target": list(provenance.of_target),
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


def timed_steps(
    module: LitHead, data: HeadDataModule, config: TrainConfig, folder: Path, warm_up: int
) -> dict[str, float]:
    """Train all steps without saving; return `Telemetry.take` of those after `warm_up`, with FLOP/s as mfu."""
    # With a peak of 1 the utilisation is FLOP/s.
    telemetry, numbers = Telemetry(peak=1.0), dict[str, float]()

    class Timing(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            if batch.last and trainer.global_step in (warm_up, module.total_steps):
                if pl_module.device.type == "cuda":
                    torch.cuda.synchronize(pl_module.device)
                numbers.update(telemetry.take(pl_module.device))

    with quiet(), tensor_cores(config):
        trainer = pl.Trainer(
            **trainer_arguments(config),
            max_steps=module.total_steps,
            logger=False,
            callbacks=[telemetry, Timing()],
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return numbers
