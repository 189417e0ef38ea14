"""A run of training in its output directory: begun, resumed, interrupted or finished.

`started.json` is written first and holds what decides the weights. `training.json` is written last and holds the
result: a run that has one is complete.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
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

from draftsmith.data.console import log_done, print_text
from draftsmith.data.ranks import LAUNCHER
from draftsmith.data.store.manifest import MANIFEST, Manifest, decisive, joined_digest, resolved
from draftsmith.data.store.parts import Part
from draftsmith.data.store.writer import writing_alone
from draftsmith.data.text.answers import Supervision
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.heads import check_intact, made_with
from draftsmith.modules.pretrained.provenance import differences, flatten
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError
from draftsmith.train.callbacks import (
    Progress,
    Save,
    StopOnSignal,
    Validate,
    exit_code,
    mismatch,
    outcome,
    untested_lengths,
)
from draftsmith.train.checkpoints import FOLDER, Checkpoints, newest_intact, step_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import HeadDataModule
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.module import IN_PYTHON, LitHead
from draftsmith.train.optimizers import TimeLimit
from draftsmith.train.strategies import tensor_cores, trainer_arguments, world_size
from draftsmith.train.tau import MeasureTau
from draftsmith.train.tracking import make_loggers

STARTED, FINISHED, RESOLVED = "started.json", "training.json", "config.yaml"
# Flags of Lightning's Trainer that an option decides.
OPTION_OF_FLAG = dict.fromkeys(("check_val_every_n_epoch", "val_check_interval"), "val_every")
OPTION_OF_FLAG |= {"accelerator": "device"} | {name: name for name in ("devices", "max_steps", "precision", "strategy")}
OPTION_OF_FLAG |= {"accumulate_grad_batches": "accumulate", "default_root_dir": "output", "gradient_clip_val": "clip"}
OPTION_OF_FLAG |= {"log_every_n_steps": "log_every", "max_epochs": "epochs", "max_time": "minutes"}
OPTION_OF_FLAG |= dict.fromkeys(("fast_dev_run", "limit_train_batches", "overfit_batches"), "max_steps")
OPTION_OF_FLAG |= {"num_nodes": "devices (or a launcher)", "plugins": "strategy"}


def finished(config: TrainConfig, digests: Mapping[str, str] | None = None) -> Path | None:
    """Return best/ of a run that is finished; None if there is something to train.

    digests: of the data, if it is open; by default of what lies at the config's paths.

    Raises:
        InputError: the output directory holds a run with other settings, or of other data than lies there now; or its
            head is gone or was changed.
    """
    if (config.output / STARTED).exists():
        if digests is None:
            sources = {"data": config.parts} | ({} if config.val is None else {"val": (Part(config.val),)})
            digests = {
                name: joined_digest(parts, [Manifest.read(part.path) for part in parts])
                for name, parts in sources.items()
                if all((part.path / MANIFEST).exists() for part in parts)
            }
        inputs = {f"inputs.{name}": digest for name, digest in digests.items()}
        _check_begun(config, {"config": decisive(config), **inputs})
    if not (config.output / FINISHED).exists():
        return None
    if not (config.output / "best").is_dir():
        found = f"{config.output}, a finished training whose best/ is gone"
        raise InputError("output", found, "best/, its head", "Choose another output, or take last/.")
    check_intact(config.output / "best")
    if rank() == 0:
        log_done("train", config.output)
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
        return finished(config, module.digests(data)) or _fit(module, data, callbacks, since, trainer_flags)


def _fit(
    module: LitHead, data: HeadDataModule, callbacks: Sequence[pl.Callback], since: float | None, flags: dict[str, Any]
) -> Path:
    config, provenance, versions = module.config, module.provenance(data), made_with()

    # Begin the run, or check that the one to resume was begun alike.
    state = {"config": decisive(config), **{name: provenance[name] for name in ("inputs", "models", "target")}}
    supervision = Supervision.of(data.train.dataset.answer_lengths(data.train.indices))
    facts = (f"data: {supervision.text()}", supervision.warning(), different_sampling(data))
    say_on_rank_zero("\n".join(filter(None, facts)))
    if (config.output / STARTED).exists():
        _check_begun(config, state)
    elif rank() == 0:
        make_directory(config.output)
        text = yaml.safe_dump(resolved(config), sort_keys=False)
        write_text(config.output / RESOLVED, f"# draftsmith train {module.head.kind} --config THIS_FILE\n{text}")
        write_json(config.output / STARTED, flatten(state))
    checkpoint = newest_intact(config.output / FOLDER)
    if step := step_of(checkpoint):
        say_on_rank_zero(f"resuming at step {step}" + ("" if config.minutes else f" of {data.total_steps}"))
    if config.minutes:
        module.state.time_limit = TimeLimit(config.minutes, since)

    # Manifest of the heads, callbacks and loggers.
    parts = {"training": data.train.lengths, "validation": data.val.lengths}
    samples = {name: {"samples": len(lengths), "tokens": int(sum(lengths))} for name, lengths in parts.items()}
    samples["training"] |= dataclasses.asdict(supervision)
    manifest = {**provenance, "samples": samples, "config": resolved(config), "options": decisive(config)}
    manifest |= {"seed": config.seed, **versions}
    checkpoints = Checkpoints(config.keep, {"world_size": world_size(config), "strategy": config.strategy})
    save, val_every = Save(config, manifest, checkpoints), config.val_every or data.order.steps_per_epoch
    loggers = make_loggers(config, module.head.kind, step, provenance | versions)
    given = flags.pop("logger", None) or []

    with quiet(), tensor_cores(config):
        arguments = trainer_arguments(config)
        arguments["plugins"].append(checkpoints)
        # Lightning refuses these callbacks where their flags are off.
        kinds = {"checkpointing": Checkpoint, "progress_bar": ProgressBar, "model_summary": ModelSummary}
        for name, kind in kinds.items():
            arguments[f"enable_{name}"] = any(isinstance(callback, kind) for callback in callbacks)
        trainer = pl.Trainer(
            **(arguments | flags),
            max_steps=data.total_steps,
            val_check_interval=val_every,
            logger=[*loggers, *(given if isinstance(given, list) else [given])],
            # A checkpoint has the state of the user's callbacks behind the same step.
            callbacks=[MeasureTau(), StopOnSignal(), Validate(val_every), Progress(config), *callbacks, save],
            default_root_dir=config.output,
        )
        # It is validated as step 0, and is best/ until another is better.
        if checkpoint is None and module.head.trained:
            module.state.unvalidated = trainer.limit_val_batches > 0
        # weights_only: a checkpoint is a path that the user passes, so it is read as tensors and plain values only.
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)

    return _conclude(module, data, trainer, save)


def _conclude(module: LitHead, data: HeadDataModule, trainer: pl.Trainer, save: Save) -> Path:
    """Record that a run is complete, and return best/; or say how to resume one that was interrupted.

    Raises:
        InputError, SystemExit: as `fit`.
    """
    config, kind = module.config, module.head.kind
    interrupted = module.signal_agreed or module.signal_received
    if interrupted and (trainer.global_step < module.total_steps or module.state.unvalidated):
        command = shlex.join(["train", kind, "--config", str(config.output / RESOLVED)])
        command = f"{os.environ.get(LAUNCHER, 'draftsmith')} {command}"
        saved = f"saved step {save.saved_step}" if save.saved_step else "nothing was saved"
        again = "the same script" if config.data == (IN_PYTHON,) else command
        say_on_rank_zero(f"{signal.Signals(interrupted).name}: {saved}. Resume with: {again}")
        raise SystemExit(exit_code(interrupted))
    if save.unsaved:
        found = f"no room for the trained head ({'; '.join(save.unsaved.values())})"
        remedy = f"Free some space, then run the same command: step {save.saved_step} is saved."
        raise InputError("output", found, "room for best/, last/ and a checkpoint", remedy)

    # The run is complete.
    best, latest = module.state.best, module.state.latest
    if rank() == 0:
        write_json(config.output / FINISHED, {"steps": trainer.global_step, "best": best, "last": latest})
    trainer.strategy.barrier("finished")
    if rank() == 0:
        print_text(f"{kind} head: {config.output / 'best'} (step {best.get('step', 0):.0f})")
        lines = outcome(module), mismatch(latest), untested_lengths(module, data.train.lengths)
        for line in filter(None, lines):
            print_text(line)
    # A signal in the last step: the training is complete, but nothing more was wanted.
    if interrupted in {signal.SIGINT, signal.SIGTERM}:
        raise SystemExit(128 + interrupted)
    return config.output / "best"


def different_sampling(data: HeadDataModule) -> str:
    """Say how the answers of joined artifacts were sampled, if not alike; else return an empty string."""
    manifests = getattr(data.train.dataset, "manifests", ())
    ways = {json.dumps(manifest.sampling): str(manifest.directory) for manifest in manifests}
    listed = "; ".join(f"{directory} {way}" for way, directory in ways.items())
    return f"note: answers sampled in {len(ways)} ways: {listed}" if len(ways) > 1 else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Hide messages and warnings of Lightning and DeepSpeed."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # On any machine with SLURM it asks for srun; our processes are started by `draftsmith launch`.
        warnings.filterwarnings("ignore", message="The `srun` command is available")
        # Metrics are those of all ranks already; --num-workers is the user's choice.
        for harmless in ("It is recommended to use `self.log", "You have overridden `tran", ".* not have many workers"):
            warnings.filterwarnings("ignore", message=harmless)
        # torch's pytrees, and collectives that DeepSpeed calls by their old names.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.|torch\.distributed\.")
        yield


def _check_begun(config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Raise InputError with every entry of started.json that differs from those of the run to resume.

    state: its parts, or single entries ("inputs.data").
    """
    begun = read_object(config.output / STARTED, {}, "Restore it, or choose another output.")
    now = flatten(state)
    was = {key: value for key, value in begun.items() if key in now or key.split(".")[0] in state}
    if differing := differences(now, was):
        found = "another " + "; ".join(f"{key}: {new}, begun with {old}" for key, new, old in differing)
        remedy = f"Restore it (see {config.output / RESOLVED}), or choose another output."
        raise InputError("output", found, "the settings and data that the run was begun with", remedy)
