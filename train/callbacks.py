"""Callbacks between steps: when to validate, what to save, how a run ends, and its verdict.

They stand in the order of time: a step ends, Lightning validates, and everything is saved. A checkpoint is taken when
all that belongs to a step is done, so that a resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import nn

from draftsmith.data.console import log_note, progress_bar
from draftsmith.modules.pretrained.files import CannotWrite
from draftsmith.train.checkpoints import FOLDER, Checkpoints, path_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.deepspeed import whole_head
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.module import SIGNALS, LitHead
from draftsmith.train.tracking import TrackedRun

# Saves a head under a name (best, last) with its step and metrics; called on rank 0.
SaveHead = Callable[[nn.Module, str, int, dict[str, float]], None]
REQUEUE_S = 60
# Fewer validations do not show a trend.
LEAST_VALIDATIONS = 3
# Relative changes below this one are noise: the next 16 held-out prompts move tau by about as much.
NOISE = 0.02
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
        final, stopping = trainer.global_step == pl_module.total_steps, bool(pl_module.signal_agreed)
        if stopping and not final:
            # A signal leaves no time for it.
            trainer.limit_val_batches = 0
        elif pl_module.validates_next:
            trainer.val_check_batch = trainer.global_step
        # Lightning validates before it stops.
        trainer.should_stop |= stopping or final

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.val_check_batch = self.val_every


class Progress(pl.Callback):
    """Callback that draws the progress bar, and a line for each validation."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        # The first step of this process, and when it began.
        self._began, self._began_at = 0, 0.0
        self._bar = ExitStack()
        self._advance: Callable[[float], None] = lambda amount: None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        limit = pl_module.state.time_limit
        size = (pl_module.total_steps, "steps", trainer.global_step)
        if limit is not None:
            size = (round(60 * self.config.minutes), "s", limit.begin())
        drawn = progress_bar(
            f"train {pl_module.head.kind}", *size, enabled=rank() == 0, state=lambda: training_loss(pl_module, ", ")
        )
        self._advance = self._bar.enter_context(drawn)
        self._began, self._began_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        limit = pl_module.state.time_limit
        self._advance(1 if limit is None else limit.passed())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step, total, state = trainer.global_step, pl_module.total_steps, pl_module.state
        probe, earlier = pl_module.probe, state.curve[:-1]
        if probe is not None and probe.monitor in state.latest and not any(probe.monitor in m for _, m in earlier):
            say_on_rank_zero(probe.measured)
        rate = pl_module.logged.get("cost/tokens_per_s")
        pace = training_loss(pl_module, "; ") + ("" if rate is None else f", {rate:,.0f} tokens/s")
        if self._began < step < total:
            left = (time.monotonic() - self._began_at) / (step - self._began) * (total - step)
            pace += f", {left:.0f} s left" if left < 120 else f", {left / 60:.0f} min left"
        say_on_rank_zero(f"step {step}/{total}: {shown(state.latest)}{pace}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._bar.close()


class Save(pl.Callback):
    """Callback that saves best/, last/ and checkpoints/ after steps and their validations.

    A full disk does not end the run: earlier saves stay, and the error is logged. saved_step: step of the newest
    checkpoint. unsaved: maps "best" and "last" to the error of its last save, if that failed.
    """

    def __init__(self, config: TrainConfig, save_head: SaveHead, checkpoints: Checkpoints):
        self.config, self.save_head, self.checkpoints = config, save_head, checkpoints
        self.saved_step = 0
        self.unsaved: dict[str, str] = {}
        # When the last step ended; and after which one last/ and a checkpoint were due.
        self._ended, self._due = 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_step = self._due = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended, every = time.monotonic(), self.config.save_every
        if not validates(trainer) and (trainer.should_stop or (every and trainer.global_step % every == 0)):
            self._save(trainer, pl_module)
        pl_module.telemetry.resume()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step, metrics, state, every = (
            trainer.global_step,
            pl_module.state.latest,
            pl_module.state,
            self.config.save_every,
        )
        monitor, sign = best_metric(pl_module, metrics, pl_module.probe is not None)
        # The best so far may be without it: tau may be measured since a resumption only.
        kept = state.best.get(monitor, float("nan"))
        better = monitor in metrics and (kept != kept or sign * metrics[monitor] >= sign * kept)
        if better and not self._save_head(trainer, pl_module, "best", metrics):
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
                try:
                    self.save_head(head, name, step, metrics)
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
    """Handlers for Ctrl-C, SIGTERM and SIGUSR1: the current step finishes, everything is saved, and the run ends. A
    second Ctrl-C ends it at once; a repeated SIGTERM is ignored, as SIGKILL follows it anyway.

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
            pl_module.signal_received = number
            # torchrun forwards a Ctrl-C that the terminal has already sent to every process of the group.
            if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        # Restored at the end: the process may outlive the training, as in a notebook.
        for number in SIGNALS:
            self._replaced[number] = signal.signal(number, handle)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for number, before in self._replaced.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._replaced = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def training_loss(module: LitHead, before: str) -> str:
    """Return the newest logged training loss behind `before`; empty before the first one."""
    loss = module.logged.get("train/loss")
    return "" if loss is None else f"{before}training loss {loss:.4g}"


def best_metric(module: LitHead, metrics: Mapping[str, float], tau: bool) -> tuple[str, int]:
    """Return the metric that picks best/, and 1 if its largest value does, -1 if its smallest.

    tau: it is measured, and picks: a head can lose teacher-forced accuracy and gain tau. If no answer is as long as a
    draft, the head's own metric is missing, and the loss picks.
    """
    if tau and module.probe is not None:
        return module.probe.monitor, 1
    return (module.monitor, 1 if module.larger_is_better else -1) if module.monitor in metrics else ("loss", -1)


def judge(module: LitHead) -> str:
    """Judge a finished training: by tau, if it was measured often enough, else by the validation's own metric."""
    curve, probe = module.state.curve, module.probe
    tau = probe is not None and sum(probe.monitor in metrics for _, metrics in curve) >= LEAST_VALIDATIONS
    name, sign = best_metric(module, module.state.latest, tau)
    return verdict(name, [(step, metrics[name]) for step, metrics in curve if name in metrics], sign > 0)


def shown(metrics: dict[str, float]) -> str:
    """Format a validation for one line of a log; all metrics are in metrics.csv.

    Drafters: loss, acceptance per position, tau; other heads: all metrics.
    """
    places = [value for name, value in metrics.items() if name.startswith("accept_")]
    if not places:
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    parts = [f"loss {metrics['loss']:.4g}", "accepted by place " + " ".join(f"{value:.2f}" for value in places)]
    names = ("tau", "tau_general")
    return ", ".join([*parts, *(f"{name} {metrics[name]:.2f}" for name in names if name in metrics)])


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


def verdict(metric: str, curve: Sequence[tuple[int, float]], larger_is_better: bool = True) -> str:
    """Classify a run as overfitting, settled or still learning, from the metric's second half; an empty string with
    fewer than LEAST_VALIDATIONS.

    curve: (step, value of the metric) of each validation, in order.
    """
    curve = [(step, value) for step, value in curve if step > 0 and np.isfinite(value)]
    if len(curve) < LEAST_VALIDATIONS:
        return ""
    sign = 1 if larger_is_better else -1
    last_step, last = curve[-1]
    best_step, best = max(curve, key=lambda point: sign * point[1])
    noise = NOISE * abs(last)
    if sign * (best - last) > noise:
        lost = f"{metric} went from {best:.3g} at step {best_step} to {last:.3g}"
        return f"overfits: {lost}, and best/ is of step {best_step}; more answers would help, more steps would not"
    steps, values = zip(*curve, strict=True)
    half = float(np.interp(last_step / 2, steps, values))
    if sign * (last - half) <= noise:
        change = f"{metric} {half:.3g} after half of the steps, {last:.3g} at the end"
        return f"settled: {change}; more steps on these answers would bring little"
    change = f"{metric} {half:.3g} after half of the steps, {last:.3g} at the end"
    return f"still learning: {change}; more steps would bring more, on new answers best"


def mismatch(metrics: Mapping[str, float]) -> str:
    """Warn if the head drafts general prompts much worse than held-out text of its training; else an empty string."""
    own, general = metrics.get("tau"), metrics.get("tau_general")
    if own is None or general is None or general >= LEAST_GENERAL * own:
        return ""
    return (
        f"warning: tau is {own:.2f} on held-out text of the training's own kind and {general:.2f} on general prompts: "
        "what is served decides. Train on prompts like those (--tau-data measures on them)"
    )
