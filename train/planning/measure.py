"""`draftsmith plan --measure`: a few steps of the real training, timed; nothing is written where it would write."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from draftsmith.data.store.manifest import MANIFEST
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig, TrainDrafterConfig
from draftsmith.train.data_module import HeadDataModule
from draftsmith.train.fit import quiet
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import num_ranks
from draftsmith.train.planning.estimate import TrainingPlan
from draftsmith.train.prepare import prepare
from draftsmith.train.strategies import tensor_cores, trainer_arguments
from draftsmith.train.telemetry import Telemetry

WARM_UP, TIMED = 3, 5


@dataclass(frozen=True)
class MeasuredSteps:
    """steps: that were timed. flops_per_s: model FLOPs over their time on one rank. tokens_per_s: of one rank.
    peak_bytes: of this process, models and libraries included."""

    steps: int
    flops_per_s: float
    tokens_per_s: float
    peak_bytes: int

    def hours(self, plan: TrainingPlan) -> float:
        """Hours for all steps, by their FLOPs, as the timed ones may be of short documents; validation is not in it."""
        return plan.step_flops * plan.steps / plan.world / self.flops_per_s / 3600

    def text(self, plan: TrainingPlan) -> str:
        planned = plan.own.peak
        return (
            f"measured {self.steps} steps: {self.tokens_per_s:,.0f} tokens/s and "
            f"{self.flops_per_s / 1e9:,.1f} GFLOP/s a rank; all {plan.steps:,} steps would take "
            f"{self.hours(plan):.3g} hours, validation aside\n"
            f"measured peak {self.peak_bytes / 1e6:,.0f} MB, planned {planned / 1e6:,.0f} MB: "
            f"{planned / self.peak_bytes:.2f} of it"
        )


class Timing(pl.Callback):
    """What the training's own telemetry says of the steps after the first WARM_UP."""

    def __init__(self) -> None:
        self.telemetry = Telemetry(peak=1.0)  # so that its utilisation is FLOP/s
        self.numbers: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.last and trainer.global_step in (WARM_UP, trainer.max_steps):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self.numbers = self.telemetry.take(pl_module.device)


def measure_steps(config: TrainConfig) -> MeasuredSteps:
    """Train for a few steps on the first batches.

    Raises:
        InputError: as the training itself, or there is no data yet.
    """
    if not (config.data / MANIFEST).exists():
        remedy = "Make it (a few rows will do), or leave --measure out."
        raise InputError("data", f"no artefact at {config.data}", "data to measure a training on", remedy)
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        changes: dict[str, Any] = {"output": Path(folder) / "run", "max_steps": WARM_UP + TIMED}
        changes |= {"resume": False, "wandb": "off"}
        if isinstance(config, TrainDrafterConfig):
            changes |= {"tau_prompts": 0, "feature_cache": None}
        own: Any = dataclasses.replace(config, **changes)
        module, data, *_ = prepare(own)
        found = timed_steps(module, data, own, folder)
    return MeasuredSteps(TIMED, found["mfu"], found["tokens_per_s"] / num_ranks(), int(found["memory_gb"] * 1e9))


def timed_steps(module: LitHead, data: HeadDataModule, config: TrainConfig, folder: str | Path) -> dict[str, float]:
    """What `Telemetry.take` says of the TIMED steps behind WARM_UP others, which are all of the training's; its mfu is
    FLOP/s. folder: for what Lightning may leave."""
    timing = Timing()
    with quiet(), tensor_cores(config):
        trainer = pl.Trainer(
            **trainer_arguments(config),
            max_steps=WARM_UP + TIMED,
            logger=False,
            callbacks=[timing.telemetry, timing],
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return timing.numbers
