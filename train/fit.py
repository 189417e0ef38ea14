"""One run of training from its output directory's point of view: begun, continued, interrupted or finished.

`started.json` holds what decides the weights and is written first; `training.json` holds the result and is written
last: presence means complete.
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
import yaml
from torch import nn

from draftsmith.data.console import print_text
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import head_fields, save_head
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.manifest import (
    decisive,
    differences,
    flatten,
    git_commit,
    package_versions,
    resolved,
    warn_not_compared,
    without_unrecorded,
)
from draftsmith.data.store.reading import read_object
from draftsmith.data.text.answers import Supervision
from draftsmith.modules.types import InputError
from draftsmith.train.callbacks import BetweenSteps, SaveHead
from draftsmith.train.checkpoints import FOLDER, Checkpoints, all_in, newest_intact, step_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import HeadDataModule, Samples
from draftsmith.train.lit_head import LitHead
from draftsmith.train.loggers import HeadArtifact, make_loggers
from draftsmith.train.metrics import is_first_process, say_on_rank_zero
from draftsmith.train.signals import StopOnSignal, exit_code
from draftsmith.train.strategies import tensor_cores, trainer_arguments, world_size
from draftsmith.train.tau import TauProbe

READ_MODEL = "read_model"
STARTED, FINISHED, RESOLVED = "started.json", "training.json", "config.yaml"


@dataclass(frozen=True)
class Provenance:
    """What a head was made from.

    job: the kind of the head. inputs: name -> digest of each artefact. read_model: identity of the model whose
    hidden states the head reads. models: identities of all models concerned. sampling: what labels hold for, if any;
    labels: what kind they are, as the head's config.json says it. of_target: as of `DraftHead`.
    """

    job: str
    inputs: dict[str, str]
    read_model: dict[str, str]
    models: dict[str, Any]
    sampling: dict[str, Any] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    of_target: tuple[str, ...] = ()


def finished(config: TrainConfig) -> Path | None:
    """best/ of a finished run that is asked to be continued; nothing of it changes, which the user is told.

    Raises:
        InputError: the output directory holds a run, and it is not to be continued; or it is, with other settings.
    """
    done = config.output / FINISHED
    if config.resume and done.exists():
        begun = read_object(config.output / STARTED, {}, "Choose another output.")
        now = flatten({"config": decisive(config)})
        recorded = now.keys() & begun.keys()  # earlier versions had fewer settings
        differing = differences({key: now[key] for key in recorded}, {key: begun[key] for key in recorded})
        if differing:
            found = "another " + "; ".join(f"{key}: {new}, trained with {was}" for key, new, was in differing)
            remedy = f"Leave them out, or train anew in another output: {config.output} is finished."
            raise InputError("resume", found, "the settings of the finished training", remedy)
        say_on_rank_zero(f"{config.output} holds a finished training: nothing is left to do, and nothing is changed")
    if config.resume:
        return config.output / "best" if done.exists() else None
    if done.exists() or all_in(config.output / FOLDER):
        found = f"{config.output}, which holds {'a finished' if done.exists() else 'an interrupted'} training"
        raise InputError("output", found, "a new directory", "Pass --resume to go on, or choose another.")
    return None


def digests(train: Any, val: Any | None) -> dict[str, str]:
    """Hashes of the content that a head is trained and validated on."""
    return {"data": train.manifest.digest} | ({"val": val.manifest.digest} if val is not None else {})


def fit(
    module: LitHead, data: HeadDataModule, config: TrainConfig, provenance: Provenance, probe: TauProbe | None = None
) -> Path:
    """Train, or go on training, and return best/.

    Raises:
        InputError: the run to be continued was begun with other settings or data.
        SystemExit: 130 after Ctrl-C and 143 after SIGTERM, as a shell reports them; everything is saved by then. After
            SIGUSR1 0 when SLURM starts the job again (train/signals.py), else 138.
    """
    checkpoint = _checkpoint(config, provenance)
    step = step_of(checkpoint)
    learned = tell_supervision(data.train)
    if is_first_process():
        _begin(config, provenance)
    checkpoints = Checkpoints(
        config.keep, {"world_size": world_size(config), "strategy": config.strategy}, config.accumulate
    )
    val_every = config.val_every or data.order.steps_per_epoch
    between = BetweenSteps(config, val_every, _head_saver(config, provenance, data, learned), checkpoints, probe)
    loggers = make_loggers(config, provenance.job, step, say_on_rank_zero, _made_from(provenance))
    if step:
        say_on_rank_zero(f"going on from step {step} of {module.total_steps}")
    with quiet(), tensor_cores(config):
        arguments = trainer_arguments(config)
        arguments["plugins"].append(checkpoints)
        trainer = pl.Trainer(
            **arguments,
            max_steps=module.total_steps,
            logger=loggers,
            callbacks=[between.telemetry, between, HeadArtifact(config.output / "best"), StopOnSignal()],
            default_root_dir=config.output,
        )
        # weights_only: a checkpoint is a path that the user passes, so it is read as tensors and plain values only.
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return _end(module, trainer, between, config, provenance)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what Lightning and DeepSpeed say of themselves."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # On any machine that has SLURM: to use srun. Processes are started by draftsmith launch.
        warnings.filterwarnings("ignore", message="The `srun` command is available")
        # Of a LitDrafter, which a plain Trainer asks for more than ours does.
        warnings.filterwarnings("ignore", message="You defined a `validation_step`|You have overridden `transfer_batch")
        # About torch's pytrees, and about collectives that DeepSpeed calls by their old names.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.|torch\.distributed\.")
        yield


def _end(
    module: LitHead, trainer: pl.Trainer, between: BetweenSteps, config: TrainConfig, provenance: Provenance
) -> Path:
    """best/ of a complete training, which is recorded as such.

    Raises:
        InputError: the disk took no head. SystemExit: as of `fit`.
    """
    interrupted = module.signal_agreed or module.signal_received
    if trainer.global_step < module.total_steps:
        assert interrupted, f"stopped at step {trainer.global_step} of {module.total_steps} without a signal"
        _leave(interrupted, between.saved_step, config, provenance)
    if between.unsaved:
        found = f"no room for the trained head ({between.unsaved})"
        remedy = f"Free some space, then pass --resume: step {between.saved_step} is saved."
        raise InputError("output", found, "room for best/, last/ and a checkpoint", remedy)
    if is_first_process():
        result = {"steps": module.total_steps, "best": between.best, "last": between.latest}
        write_json(config.output / FINISHED, result)
    trainer.strategy.barrier("finished")
    if is_first_process():
        print_text(f"{provenance.job} head: {config.output / 'best'} (step {between.best.get('step', 0):.0f})")
    if interrupted in {signal.SIGINT, signal.SIGTERM}:  # in the last step: complete, but nothing more was wanted
        raise SystemExit(128 + interrupted)
    return config.output / "best"


def _state(config: TrainConfig, provenance: Provenance) -> dict[str, Any]:
    made_from = {"inputs": provenance.inputs, "models": provenance.models, READ_MODEL: provenance.read_model}
    return flatten({"config": decisive(config), **made_from})


def _differing(now: Mapping[str, Any], was: Mapping[str, Any]) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """What differs in two states, and what the older one does not record."""
    differing, unrecorded = without_unrecorded(differences(now, was))
    if not any(key.startswith(READ_MODEL) for key in was):  # an earlier version wrote it
        differing = [entry for entry in differing if not entry[0].startswith(READ_MODEL)]
        unrecorded = [*(key for key in unrecorded if not key.startswith(READ_MODEL)), READ_MODEL]
    return differing, unrecorded


def _checkpoint(config: TrainConfig, provenance: Provenance) -> Path | None:
    """What to go on from; None begins anew.

    Raises:
        InputError: lists every setting and input that differs from those the run was begun with; or every checkpoint is
            damaged.
    """
    if not config.resume:
        return None
    started = config.output / STARTED
    if started.exists():
        begun = read_object(started, {}, "Restore it, or choose another output.")
        differing, unrecorded = _differing(_state(config, provenance), begun)
        warn_not_compared(str(started), unrecorded)
        if differing:
            found = "another " + "; ".join(f"{key}: {now}, begun with {was}" for key, now, was in differing)
            remedy = f"Restore it (see {config.output / RESOLVED}), or choose another output."
            raise InputError("resume", found, "the settings and data that the run was begun with", remedy)
    return newest_intact(config.output / FOLDER, say_on_rank_zero)


def _begin(config: TrainConfig, provenance: Provenance) -> None:
    make_directory(config.output)
    if config.resume and (config.output / STARTED).exists():
        return
    plain = resolved(dataclasses.replace(config, resume=False))
    text = yaml.safe_dump(plain, sort_keys=False)
    write_text(config.output / RESOLVED, f"# draftsmith train {provenance.job} --config THIS_FILE\n{text}")
    write_json(config.output / STARTED, _state(config, provenance))


def _made_from(provenance: Provenance) -> dict[str, Any]:
    """What a tracker is told of a run beside its config."""
    made_from = {**dataclasses.asdict(provenance), "packages": package_versions(), "git_commit": git_commit()}
    del made_from["job"]
    return made_from


def tell_supervision(train: Samples) -> dict[str, float]:
    """Say what will be learned, and warn where that is little; its numbers."""
    learned = Supervision.of(train.dataset.answer_lengths(train.indices))
    say_on_rank_zero(f"data: {learned.text()}")
    if warning := learned.warning():
        say_on_rank_zero(warning)
    return learned.numbers()


def _head_saver(
    config: TrainConfig, provenance: Provenance, data: HeadDataModule, learned: Mapping[str, float]
) -> SaveHead:
    """Saves a head under output/NAME, with its manifest and model card. learned: what `tell_supervision` said."""
    parts = {"training": data.train.lengths, "validation": data.val.lengths}
    samples: dict[str, dict[str, float]] = {
        name: {"samples": len(lengths), "tokens": int(sum(lengths))} for name, lengths in parts.items()
    }
    samples["training"] |= learned
    made_with = {"packages": package_versions(), "git_commit": git_commit()}

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
            "seed": config.seed,
            "step": step,
            "metrics": dict(metrics),
            **made_with,
        }
        card = model_card(provenance.job, {"head": head_fields(head), **manifest})
        save_head(config.output / name, head, manifest, card)

    return save


def _leave(number: int, step: int, config: TrainConfig, provenance: Provenance) -> None:
    command = ["draftsmith", "train", provenance.job, "--config", str(config.output / RESOLVED), "--resume"]
    saved = f"saved step {step}" if step else "nothing was saved"
    say_on_rank_zero(f"{signal.Signals(number).name}: {saved}. Go on with: {shlex.join(command)}")
    raise SystemExit(exit_code(number, config.resume))
