"""`draftsmith plan --measure`: a few steps of the real training, timed; nothing is written where it would write."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from draftsmith.data.store.manifest import MANIFEST
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.benchmark.synthetic import dialogue_lengths, write_responses
from draftsmith.train.config import TrainConfig, TrainDrafterConfig
from draftsmith.train.data_module import Part
from draftsmith.train.lit_head import LitHead
from draftsmith.train.planning.estimate import Plan, frozen_model, planned_dtype
from draftsmith.train.prepare import TrainedConfig, prepare
from draftsmith.train.strategies import trainer_arguments
from draftsmith.train.telemetry import peak_memory_gb

WARM_UP, TIMED = 3, 5


@dataclass(frozen=True)
class Measured:
    """steps: that were timed. flops_per_s: model FLOPs over their time on one rank. tokens_per_s: of one rank.
    peak_bytes: of this process, models and libraries included. on_what: real or made-up data."""

    steps: int
    seconds: float
    flops_per_s: float
    tokens_per_s: float
    peak_bytes: int
    on_what: str

    def hours(self, plan: Plan) -> float:
        """For all steps, by their FLOPs, as the timed ones may be of short documents; validation is not in it."""
        return plan.step_flops * plan.steps / plan.world / self.flops_per_s / 3600

    def text(self, plan: Plan) -> str:
        planned = plan.own.peak
        return (
            f"measured {self.steps} steps on {self.on_what}: {self.tokens_per_s:,.0f} tokens/s and "
            f"{self.flops_per_s / 1e9:,.1f} GFLOP/s a rank; all {plan.steps:,} steps would take "
            f"{self.hours(plan):.3g} hours, validation aside\n"
            f"measured peak {self.peak_bytes / 1e6:,.0f} MB, planned {planned / 1e6:,.0f} MB: "
            f"{planned / self.peak_bytes:.2f} of it"
        )


class StepClock(pl.Callback):
    """Wall seconds, tokens and FLOPs of the steps after the first WARM_UP, of this rank."""

    def __init__(self, warm_up: int = WARM_UP):
        self._warm_up = warm_up
        self.seconds, self.tokens, self.flops, self.steps = 0.0, 0, 0.0, 0
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        assert isinstance(pl_module, LitHead) and isinstance(batch, Part)
        if trainer.global_step < self._warm_up:
            return
        if not self._started:
            self._started = _now(pl_module.device)
        self.tokens += sum(pl_module.lengths_of(batch))
        self.flops += pl_module.flops(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch.last and self._started:
            self.steps += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = _now(pl_module.device) - self._started


def _now(device: torch.device) -> float:
    """Wall seconds, once a GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(config: TrainConfig, plan: Plan) -> Measured:
    """Train for a few steps on the first batches; on made-up responses where the data is not there.

    Raises:
        InputError: as the training itself; or acceptance labels that are not there, which can not be made up.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        own, on_what = short_run(config, Path(folder))
        assert isinstance(own, TrainedConfig)
        module, data, *_ = prepare(own)
        clock = StepClock()
        trainer = pl.Trainer(
            **trainer_arguments(own),
            max_steps=own.max_steps,
            logger=False,
            callbacks=[clock],
            default_root_dir=folder,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
            trainer.fit(module, datamodule=data)
        peak = int(peak_memory_gb(module.device) * 1e9)
    return Measured(
        clock.steps, clock.seconds, clock.flops / clock.seconds, clock.tokens / clock.seconds, peak, on_what
    )


def short_run(config: TrainConfig, folder: Path) -> tuple[TrainConfig, str]:
    """The settings of a few steps that leave nothing behind, and what they train on."""
    changes: dict[str, Any] = {"output": folder / "run", "max_steps": WARM_UP + TIMED, "resume": False, "wandb": "off"}
    if isinstance(config, TrainDrafterConfig):
        changes |= {"tau_prompts": 0, "unroll_after": 0.0, "feature_cache": None}
    if (config.data / MANIFEST).exists():
        return dataclasses.replace(config, **changes), str(config.data)
    if not isinstance(config, TrainDrafterConfig):
        assert isinstance(config, TrainAcceptanceConfig)
        remedy = "Make it with data acceptance, or leave --measure out."
        raise InputError("data", f"no artefact at {config.data}", "labels to measure a training on", remedy)
    target = frozen_model(config.target, planned_dtype(config))
    assert target.llama is not None
    steps = changes["max_steps"]
    number = config.batch_size * steps
    if config.tokens_per_batch:
        number = max(2, config.tokens_per_batch * steps // 400)
    lengths = [min(length, target.context) for length in dialogue_lengths(number)]
    data = write_responses(folder / "responses", config.target, lengths, target.llama.vocab_size)
    return dataclasses.replace(config, **changes, data=data, val=None), f"{number} made-up dialogues"
