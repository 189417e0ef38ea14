"""Logging, validation and saving between steps.

One callback does all three in this order, instead of Lightning's validation and checkpointing. A checkpoint is taken
when a step and everything that belongs to it is done, so that a resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import nn

from draftsmith.data.console import progress_bar
from draftsmith.modules.pretrained.files import CannotWrite
from draftsmith.train.checkpoints import FOLDER, Checkpoints, path_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.deepspeed import whole_head
from draftsmith.train.lit_head import LitHead
from draftsmith.train.loggers import TrackedRun
from draftsmith.train.metrics import rank, say_on_rank_zero
from draftsmith.train.tau import TauProbe
from draftsmith.train.telemetry import Telemetry
from draftsmith.train.verdict import FEWEST, verdict

# Saves a head under a name (best, last) with its step and metrics; called on rank 0.
SaveHead = Callable[[nn.Module, str, int, dict[str, float]], None]


class BetweenSteps(pl.Callback):
    """Callback that logs every `log_every` steps, validates, and writes best/, last/ and checkpoints/.

    A full disk does not end the run: earlier saves stay, and the error is logged. curve: step and metrics of each
    validation. saved_step: of the newest checkpoint. unsaved: best and last -> error of their last save, if it failed.
    telemetry: callback that counts the steps' cost; it stands before this one.
    """

    def __init__(
        self,
        config: TrainConfig,
        val_every: int,
        save_head: SaveHead,
        checkpoints: Checkpoints,
        probe: TauProbe | None = None,
    ):
        """val_every: steps between validations."""
        self.config, self.val_every = config, val_every
        self.save_head, self.checkpoints, self.probe = save_head, checkpoints, probe
        self.telemetry = Telemetry()
        self.best: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.curve: list[tuple[int, dict[str, float]]] = []
        self.saved_step = 0
        self.unsaved: dict[str, str] = {}
        # The newest logged metrics; the first step of this process, and when it began.
        self._logged: dict[str, float] = {}
        self._began, self._began_at = 0, 0.0
        self._bar = ExitStack()
        self._advance: Callable[[float], None] = lambda amount: None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "latest": self.latest, "curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.latest, self.curve = (state_dict[name] for name in ("best", "latest", "curve"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_step = trainer.global_step
        name, limit = f"train {pl_module.head.kind}", pl_module.time_limit
        size = (pl_module.total_steps, "steps", trainer.global_step)
        if limit is not None:
            size = (round(60 * self.config.minutes), "s", limit.begin())
        drawn = progress_bar(name, *size, enabled=rank() == 0, state=lambda: self._training_loss(", "))
        self._advance = self._bar.enter_context(drawn)
        self._began, self._began_at = trainer.global_step, time.monotonic()
        if pl_module.validates_first and trainer.global_step == 0:
            with whole_head(trainer, pl_module) as head:
                self._validate(trainer, pl_module, head, 0, final=False)

    def verdict(self, module: LitHead) -> str:
        """Judge a finished training: by tau, if it was measured often enough, else by the validation's own metric."""
        tau = self.probe is not None and sum(self.probe.monitor in metrics for _, metrics in self.curve) >= FEWEST
        name, sign = self._monitor(module, self.latest, tau)
        return verdict(name, [(step, metrics[name]) for step, metrics in self.curve if name in metrics], sign > 0)

    def _monitor(self, module: LitHead, metrics: dict[str, float], tau: bool) -> tuple[str, int]:
        """Return the metric that picks best/, and 1 if its largest value does, -1 if its smallest.

        If tau is measured it does: a head can lose teacher-forced accuracy and gain tau. If no answer is as long as a
        draft, the head's own metric is missing, and the loss does.
        """
        if tau and self.probe is not None:
            return self.probe.monitor, 1
        return (module.monitor, 1 if module.larger_is_better else -1) if module.monitor in metrics else ("loss", -1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Log the best head, if the training is complete: one version per run, not one per save."""
        self._bar.close()
        best = self.config.output / "best"
        if trainer.global_step == pl_module.total_steps and best.is_dir():
            for logger in trainer.loggers:
                if isinstance(logger, TrackedRun):
                    logger.log_head(best)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._bar.close()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch.last:
            return
        # A step ends with its last part.
        step, final = trainer.global_step, trainer.global_step == pl_module.total_steps
        if pl_module.logs(step):
            # Reading the losses back waits for the device, so the time that telemetry takes afterwards is right.
            metrics = {f"train/{name}": value for name, value in pl_module.means.take().items()}
            metrics["bad_steps"] = pl_module.bad_steps.count
            metrics["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
            metrics["grad_norm"] = pl_module.grad_norm
            costs = self.telemetry.take(pl_module.device) | pl_module.costs()
            metrics |= {f"cost/{name}": value for name, value in costs.items()}
            self._logged = metrics
            log_metrics(trainer, metrics, step)

        began = time.monotonic()
        # Validation decides which head is best/. A signal leaves no time for it.
        stopping = bool(pl_module.signal_agreed)
        trial = pl_module.validates_next and not stopping
        validated = final or trial or (step % self.val_every == 0 and not stopping)
        if validated:
            with whole_head(trainer, pl_module) as head:
                self._validate(trainer, pl_module, head, step, final or trial)

        # last/ and a checkpoint, each whole or absent. Without --save-every they follow each validation.
        saves = step % self.config.save_every == 0 if self.config.save_every else validated
        if saves or final or stopping:
            with whole_head(trainer, pl_module) as head:
                self._save_head(trainer, head, "last", step, self.latest)
            trainer.save_checkpoint(path_of(self.config.output / FOLDER, step))
            if not self._agree_on_failure(trainer, f"the checkpoint of step {step}", self.checkpoints.failure):
                self.saved_step = step
        if pl_module.time_limit is not None and validated:
            pl_module.time_limit.pause(time.monotonic() - began)
        trainer.should_stop |= stopping or final
        self._advance(1 if pl_module.time_limit is None else pl_module.time_limit.passed())
        self.telemetry.resume()

    def _validate(self, trainer: pl.Trainer, module: LitHead, head: nn.Module, step: int, final: bool) -> None:
        head.eval()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning, undeclared
        parts = data.val_batches(trainer.global_rank, trainer.world_size)
        with module.autocast():
            metrics = module.validate(parts)
        probed = self.probe if self.probe is not None and (final or step % self.probe.every == 0) else None
        # Decode real prompts with the head, if it is time for that.
        metrics |= {} if probed is None else probed()
        head.train()
        self.latest = metrics
        self.curve.append((step, metrics))
        log_metrics(trainer, {f"val/{name}": value for name, value in metrics.items()}, step)
        if probed is not None and not any(probed.monitor in earlier for _, earlier in self.curve[:-1]):
            say_on_rank_zero(probed.measured)
        say_on_rank_zero(f"step {step}/{module.total_steps}: {shown(metrics)}{self._pace(step, module.total_steps)}")
        monitor, sign = self._monitor(module, metrics, self.probe is not None)
        # The best so far may be without it: tau may be measured since a resumption only.
        kept = self.best.get(monitor, float("nan"))
        if monitor in metrics and (kept != kept or sign * metrics[monitor] >= sign * kept):
            best = {**metrics, "step": float(step)}
            if not self._save_head(trainer, head, "best", step, metrics):
                self.best = best

    def _training_loss(self, before: str) -> str:
        """Return the newest logged training loss behind `before`; empty before the first one."""
        loss = self._logged.get("train/loss")
        return "" if loss is None else f"{before}training loss {loss:.4g}"

    def _pace(self, step: int, total: int) -> str:
        """Return the training loss, its speed and the time left."""
        text, rate = self._training_loss("; "), self._logged.get("cost/tokens_per_s")
        text += "" if rate is None else f", {rate:,.0f} tokens/s"
        if self._began < step < total:
            left = (time.monotonic() - self._began_at) / (step - self._began) * (total - step)
            text += f", {left:.0f} s left" if left < 120 else f", {left / 60:.0f} min left"
        return text

    def _save_head(self, trainer: pl.Trainer, head: nn.Module, name: str, step: int, metrics: dict[str, float]) -> str:
        """Save the head from rank 0; return the error or an empty string, the same on every rank."""
        failure = ""
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


def shown(metrics: dict[str, float]) -> str:
    """Format a validation for one line of a log; all metrics are in metrics.csv.

    Of a drafter: its loss, the acceptance rate by place, and the acceptance length. Of another head: all.
    """
    places = [value for name, value in metrics.items() if name.startswith("accept_")]
    if not places:
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    parts = [f"loss {metrics['loss']:.4g}", "accepted by place " + " ".join(f"{value:.2f}" for value in places)]
    names = ("tau", "tau_general")
    return ", ".join([*parts, *(f"{name} {metrics[name]:.2f}" for name in names if name in metrics)])


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """Log to every logger, without the per-step bookkeeping of `self.log`. A full disk does not end the run."""
    for logger in trainer.loggers:
        try:
            logger.log_metrics(metrics, step)
        except (OSError, CannotWrite) as error:
            say_on_rank_zero(f"warning: could not write the metrics of step {step} ({error})")
