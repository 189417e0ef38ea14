"""Callbacks between steps: when to validate, what to save, how a run ends, and what is said of it.

They stand in the order of time: a step ends, Lightning validates, and everything is saved. A checkpoint is taken when
all that belongs to a step is done, so that a resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import numpy as np

from draftsmith.data.console import log_note, progress_bar
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.files import CannotWrite
from draftsmith.modules.pretrained.heads import head_fields, original_of, save_head
from draftsmith.modules.types import InputError
from draftsmith.train.checkpoints import FOLDER, Checkpoints, path_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.deepspeed import whole_head
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.module import SIGNALS, LitDrafter, LitHead
from draftsmith.train.tracking import TrackedRun

REQUEUE_S = 60
# Say that longer contexts are untested if the target reads texts so many times as long as the longest row.
MANY_TIMES = 8
# Warn if tau_general is below this fraction of tau.
LEAST_GENERAL = 0.9


def validates(trainer: pl.Trainer) -> bool:
    """Return whether Lightning validates after the step that has ended."""
    return trainer.enable_validation and (
        trainer.should_stop or trainer.global_step % (trainer.val_check_batch or 1) == 0
    )


class Validate(pl.Callback):
    """Callback that ends the training after its last step, or after a signal, and chooses the steps that Lightning
    validates after: every `val_every`, the last, and one early in a training by the clock."""

    def __init__(self, val_every: int):
        self.val_every = val_every

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.validates_next:
            trainer.val_check_batch = trainer.global_step
        # Lightning validates before it stops.
        trainer.should_stop |= trainer.global_step == pl_module.total_steps
        if pl_module.agree_on_signal():
            # A signal leaves no time for it.
            pl_module.state.unvalidated, trainer.limit_val_batches = validates(trainer), 0
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.val_check_batch = self.val_every
        trainer.should_stop |= trainer.global_step == pl_module.total_steps or bool(pl_module.signal_agreed)


class Progress(pl.Callback):
    """Callback that draws the progress bar, and a line for each validation."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._bar = ExitStack()
        self._advance: Callable[[float], None] = lambda amount: None
        self._shown = 0.0  # when the bar last advanced

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        limit, self._shown = pl_module.state.time_limit, time.monotonic()
        size = (pl_module.total_steps, "steps", trainer.global_step)
        if limit is not None:
            size = (round(60 * self.config.minutes), "s", limit.begin())
        enabled, title = rank() == 0, f"train {pl_module.head.kind}"

        def state() -> str:
            return "; validating" if trainer.validating else training_loss(pl_module)

        drawn = progress_bar(title, *size, enabled=enabled, state=state)
        self._advance = self._bar.enter_context(drawn)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, self._shown = self._shown, time.monotonic()
        self._advance(1 if pl_module.state.time_limit is None else self._shown - before)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.state.unvalidated:
            return
        # By the clock, how many there will be is not known before the first.
        known = trainer.global_step or pl_module.state.time_limit is None
        position = f"step {trainer.global_step}" + (f"/{pl_module.total_steps}" if known else "")
        say_on_rank_zero(f"{position}: {shown(pl_module.state.latest)}{training_loss(pl_module)}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._bar.close()

    # Lightning tears callbacks down after a whole training only.
    on_exception: Any = on_train_end


class Save(pl.Callback):
    """Callback that saves best/, last/ and checkpoints/ after steps and their validations.

    A full disk does not end the run: earlier saves stay, and the error is logged. saved_step: step of the newest
    checkpoint. unsaved: maps "best" and "last" to the error of its last save, if that failed.
    """

    def __init__(self, config: TrainConfig, manifest: Mapping[str, Any], checkpoints: Checkpoints):
        """manifest: entries of the heads' manifests, beside step and metrics."""
        self.config, self.manifest, self.checkpoints = config, manifest, checkpoints
        self.original = None if config.starting_head is None else original_of(config.starting_head)
        self.saved_step = 0
        self.unsaved: dict[str, str] = {}
        # When the last step ended; and after which one last/ and a checkpoint were due.
        self._ended, self._due = 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_step = self._due = trainer.global_step
        self._ended = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended, every = time.monotonic(), self.config.save_every
        if not validates(trainer) and (trainer.should_stop or (every and trainer.global_step % every == 0)):
            self._save(trainer, pl_module)
        pl_module.telemetry.resume()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step, state, every = trainer.global_step, pl_module.state, self.config.save_every
        if state.unvalidated:
            return self._save(trainer, pl_module)
        metrics = state.latest
        # By a metric that both have: tau may be measured since a resumption only.
        common = metrics.keys() & state.best.keys() if state.best else metrics.keys()
        monitor, sign = best_metric(pl_module, {name: metrics[name] for name in common})
        new, kept = (sign * own.get(monitor, math.nan) for own in (metrics, state.best))
        # Of equals the later one has learned more; but weights that the training began with are kept.
        tied = new == kept and state.best["step"] > 0
        if not state.best or new > kept or tied or (math.isnan(kept) and not math.isnan(new)):
            failure = self._save_head(trainer, pl_module, "best", metrics)
            if failure and not step:
                # A later head would take its place unseen, and nothing is lost yet.
                raise InputError("output", f"no room for best/ ({failure})", "room for it", "Free some space.")
            if not failure:
                state.best = {**metrics, "step": float(step)}
        # Without --save-every they follow each validation.
        if not trainer.sanity_checking and (not every or step % every == 0 or trainer.should_stop):
            self._save(trainer, pl_module)
        if state.time_limit is not None:
            state.time_limit.pause(time.monotonic() - self._ended)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save what a callback of the user's has stopped, and log the best head: one version per run, not one per
        save."""
        if self._due < trainer.global_step:
            self._save(trainer, pl_module)
        best = self.config.output / "best"
        # Nothing was validated (limit_val_batches=0): then the last head is the best that is known.
        if not pl_module.signal_agreed and not pl_module.state.latest:
            self._save_head(trainer, pl_module, "best", {})
            pl_module.state.best = {"step": float(trainer.global_step)}
        if not pl_module.signal_agreed and best.is_dir():
            for logger in trainer.loggers:
                if isinstance(logger, TrackedRun):
                    logger.log_head(best)

    def _save(self, trainer: pl.Trainer, module: LitHead) -> None:
        """Save last/ and a checkpoint, each whole or absent."""
        step = self._due = trainer.global_step
        self._save_head(trainer, module, "last", module.state.latest)
        trainer.save_checkpoint(path_of(self.config.output / FOLDER, step))
        if not self._agree_on_failure(trainer, f"the checkpoint of step {step}", self.checkpoints.failure):
            self.saved_step = step

    def _save_head(self, trainer: pl.Trainer, module: LitHead, name: str, metrics: dict[str, float]) -> str:
        """Save the head from rank 0; return the error or an empty string, the same on every rank."""
        failure, step = "", trainer.global_step
        with whole_head(trainer, module) as head:
            if rank() == 0:
                manifest = {**self.manifest, "step": step, "metrics": metrics}
                card = model_card(head.kind, {"head": head_fields(head), **manifest})
                try:
                    save_head(self.config.output / name, head, manifest, card, self.original)
                except (OSError, CannotWrite) as error:
                    failure = str(error)
        failure = self._agree_on_failure(trainer, f"{name}/ of step {step}", failure)
        self.unsaved.pop(name, None)
        if failure:
            self.unsaved[name] = failure
        return failure

    def _agree_on_failure(self, trainer: pl.Trainer, name: str, failure: str) -> str:
        """Return rank 0's failure on every rank, and warn of it."""
        failure = trainer.strategy.broadcast(failure)
        if failure:
            kept = f"step {self.saved_step} is saved" if self.saved_step else "nothing is saved yet"
            say_on_rank_zero(f"warning: could not save {name} ({failure}); {kept}")
        return failure


class StopOnSignal(pl.Callback):
    """Handlers for Ctrl-C, SIGTERM and SIGUSR1: the current step finishes or the validation is left at its next batch,
    everything is saved, and the run ends. A second Ctrl-C ends it at once (torchrun forwards it as SIGTERM); a repeated
    SIGTERM is ignored, as SIGKILL follows it anyway.

    They replace Lightning's handlers. Its SIGTERM handler talks to other ranks from inside the handler, and Ctrl-C
    raises in the middle of a step. Its SIGUSR1 handler under SLURM saves from inside the handler, anywhere in a step
    and whether or not the other ranks are there; `exit_code` requeues instead, once the step is saved.
    """

    def __init__(self) -> None:
        self._replaced: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            # Python delivers signals to the main thread only.
            return

        def handle(number: int, frame: Any) -> None:
            again = pl_module.signal_received == signal.SIGINT and number in {signal.SIGINT, signal.SIGTERM}
            pl_module.signal_received = number
            validation = f"leaving the validation of step {trainer.global_step}"
            running = validation if trainer.validating else "finishing the step"
            said = "stopping without saving" if again else f"{running}, then saving; again stops at once"
            if rank() == 0 and (again or number == signal.SIGINT):
                os.write(sys.stderr.fileno(), f"\ndraftsmith: {said}\n".encode())  # print may be what was interrupted
            if again:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)

        # Restored at the end: the process may outlive the training, as in a notebook.
        for number in SIGNALS:
            self._replaced[number] = signal.signal(number, handle)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for number, before in self._replaced.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._replaced = {}

    on_exception: Any = on_train_end


# -- what is said


def training_loss(module: LitHead) -> str:
    """Return the newest logged training loss and speed, to end a line; empty before the first ones."""
    texts = {"train/loss": "; training loss {:.4g}", "cost/tokens_per_s": ", {:,.0f} tokens/s"}
    return "".join(text.format(module.logged[name]) for name, text in texts.items() if name in module.logged)


def best_metric(module: LitHead, metrics: Mapping[str, float]) -> tuple[str, int]:
    """Return the metric that picks best/, and 1 if its largest value does, -1 if its smallest.

    tau picks where it is measured: a head can lose teacher-forced accuracy and gain tau. Else it is the head's own
    metric, and the loss if that is missing.
    """
    if "tau" in metrics:
        return "tau", 1
    return (module.monitor, 1 if module.larger_is_better else -1) if module.monitor in metrics else ("loss", -1)


def shown(metrics: dict[str, float]) -> str:
    """Format a validation for one line of a log; all metrics are in metrics.csv.

    Where tau is measured: loss, tau, and the share accepted by place in the draft; else all metrics.
    """
    if "tau" not in metrics:
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    taus = [f"{name} {metrics[name]:.2f}" for name in ("tau", "tau_general") if name in metrics]
    places = [f"{value:.2f}" for name, value in metrics.items() if name.startswith("accepted_")]
    return ", ".join([f"loss {metrics['loss']:.4g}", *taus, f"accepted by place {' '.join(places)}"])


def exit_code(number: int) -> int:
    """Return the exit code of this process after a signal, when everything is saved: 128 + number, as in a shell.

    After SIGUSR1 in a SLURM job put the job back into the queue and return 0. Once `scontrol
    requeue` returns, the job is pending again whatever its processes do; before that, a rank that exits with another
    code would end the step, and the job as failed. If the job cannot be requeued, the first process logs why and fails,
    and with it the job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if number != signal.SIGUSR1 or job is None:
        return 128 + number
    if rank():
        return 0
    command = ["scontrol", "requeue", job]
    # Said before: SLURM may end this process while scontrol has not returned yet.
    log_note(f"asking SLURM to requeue job {job}, which resumes from there")
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REQUEUE_S)
        problem = result.stderr.strip() or "no reason given" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log_note(f"job {job} cannot be requeued: {problem}")
        return 128 + number
    return 0


def outcome(module: LitHead) -> str:
    """Say that training from trained weights brought nothing, or that nothing tells; else return an empty string."""
    best, latest = module.state.best, module.state.latest
    if not latest:
        begun = "warning: nothing was validated: best/ is the last head, which may be worse than the one it began with"
        return begun if module.head.trained else ""
    if best["step"]:
        return ""
    name, _ = best_metric(module, {name: latest[name] for name in latest.keys() & best.keys()})
    return (
        f"no validation was better than the head it began with ({name} {best[name]:.4g}; last: {latest[name]:.4g}): "
        "best/ holds that, unchanged. Try a lower --lr, or other data"
    )


def mismatch(metrics: Mapping[str, float]) -> str:
    """Warn if the head drafts general prompts much worse than held-out text of its training; else an empty string."""
    own, general = metrics.get("tau"), metrics.get("tau_general")
    if own is None or general is None or general >= LEAST_GENERAL * own:
        return ""
    return (
        f"warning: tau is {own:.2f} on held-out text of the training's own kind and {general:.2f} on general prompts: "
        "what is served decides. Train on prompts like those (--tau-data measures on them)"
    )


def untested_lengths(module: LitHead, lengths: np.ndarray) -> str:
    """Say that longer contexts are untested if a drafter's target reads texts many times as long as the longest row
    [N] that it was trained on; else an empty string."""
    longest = int(lengths.max())
    if not isinstance(module, LitDrafter) or (context := module.target.info.max_position) < MANY_TIMES * longest:
        return ""
    window = module.head.shape(module.head.config).get("window")
    if window:
        return ""
    remedy = "Train on longer rows (--max-length)" + (", or with --window N" if window == 0 else "")
    return (
        f"note: the longest row has {longest:,} tokens and the target reads {context:,}: drafts in longer contexts "
        f"are untested (data prompts --length cuts prompts to measure them). {remedy}"
    )
