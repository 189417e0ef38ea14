"""What happens between steps: log, validate, save.

One callback does it in this order, instead of Lightning's validation and checkpointing, because the order decides what
a checkpoint holds: it is taken when a step and everything that belongs to it is done, so that a continued run repeats
nothing and skips nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from draftsmith.data.progress import bar, say
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import is_first_process, rank
from draftsmith.train.telemetry import Telemetry

CHECKPOINT = "last.ckpt"
# Saves the head under a name (best, last) with its metrics; called on rank 0.
SaveHead = Callable[[str, int, dict[str, float]], None]


class BetweenSteps(pl.Callback):
    """Logs every `log_every` steps, validates, and keeps best/, last/ and last.ckpt.

    val_every: steps between validations. save_every: steps between saves of the last state; 0 saves with validations.
    telemetry: what counts the steps' cost, itself a callback of the trainer.
    probe: a costlier measurement of the head, done every `probe_every` steps (0: never); all ranks call it.
    """

    def __init__(
        self,
        output: Path,
        save_head: SaveHead,
        *,
        val_every: int,
        log_every: int,
        save_every: int,
        probe: Callable[[], dict[str, float]] | None = None,
        probe_every: int = 0,
        telemetry: Telemetry | None = None,
    ):
        self.output, self.save_head = output, save_head
        self.val_every, self.log_every, self.save_every = val_every, log_every, save_every
        self.probe, self.probe_every = probe, probe_every
        self.best: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.telemetry = telemetry or Telemetry()
        self.saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.latest = state_dict["best"], state_dict["latest"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitHead)
        if not batch.last:
            return
        step, final = trainer.global_step, trainer.global_step == pl_module.total_steps
        if step % self.log_every == 0 or final:
            self._log_losses(trainer, pl_module, step)
        stopping = bool(pl_module.signal_agreed)
        validated = final or (step % self.val_every == 0 and not stopping)
        if validated:
            self._validate(trainer, pl_module, step, final)
        saves = step % self.save_every == 0 if self.save_every else validated
        if saves or final or stopping:
            self._save_last(trainer, step)
        if stopping:
            trainer.should_stop = True
        self.telemetry.go_on()

    def _log_losses(self, trainer: pl.Trainer, module: LitHead, step: int) -> None:
        metrics = {f"train/{name}": value for name, value in module.means.take().items()}
        metrics["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        grad_norm = getattr(module, "grad_norm", None)
        if grad_norm is not None:
            metrics["grad_norm"] = float(grad_norm)
        metrics |= {f"cost/{name}": value for name, value in self.telemetry.take(module.device).items()}
        log(trainer, metrics, step)

    def _validate(self, trainer: pl.Trainer, module: LitHead, step: int, final: bool) -> None:
        module.head.eval()
        parts = trainer.datamodule.val_batches(trainer.global_rank, trainer.world_size)  # type: ignore[attr-defined]
        with trainer.precision_plugin.forward_context():
            metrics = module.validate(parts)
        if self.probe is not None and self.probe_every and (final or step % self.probe_every == 0):
            metrics |= self.probe()
        module.head.train()
        self.latest = metrics
        log(trainer, {f"val/{name}": value for name, value in metrics.items()}, step)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        say_on_rank_zero(f"step {step}/{module.total_steps}: {shown}")
        # What decoding reaches decides, where it is measured: a head can lose teacher-forced accuracy and gain tau.
        probed = self.probe is not None and self.probe_every > 0
        monitor, larger_is_better = ("tau", True) if probed else (module.monitor, module.larger_is_better)
        sign = 1 if larger_is_better else -1
        if monitor in metrics and (not self.best or sign * metrics[monitor] > sign * self.best[monitor]):
            self.best = {**metrics, "step": float(step)}
            if rank() == 0:
                self.save_head("best", step, metrics)

    def _save_last(self, trainer: pl.Trainer, step: int) -> None:
        """last/ and last.ckpt, each whole or not at all."""
        if rank() == 0:
            self.save_head("last", step, self.latest)
        partial = self.output / f"{CHECKPOINT}.tmp"
        trainer.save_checkpoint(partial)
        if rank() == 0:
            os.replace(partial, self.output / CHECKPOINT)
        trainer.strategy.barrier("checkpoint")
        self.saved_step = step


def log(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """To every logger, without Lightning's per-step bookkeeping of `self.log`."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)


class ProgressBar(pl.Callback):
    """A bar with rate and time left, on a terminal and rank 0 only; redrawn four times a second."""

    def __init__(self, name: str):
        self._name = name
        self._stack = ExitStack()
        self._advance: Callable[[float], None] = lambda amount: None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LitHead)
        shown = sys.stderr.isatty() and rank() == 0
        self._advance = self._stack.enter_context(
            bar(self._name, pl_module.total_steps, "steps", trainer.global_step, enabled=shown)
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch.last:
            self._advance(1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stack.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stack.close()


def say_on_rank_zero(text: str) -> None:
    """One line for the user, from one process only; also before the process group is there."""
    if is_first_process():
        say(text)
