"""`draftsmith plan --measure`: a few steps of the real training, timed; nothing is written where it would write."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from draftsmith.data.store.manifest import MANIFEST
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import TrainConfig, TrainDrafterConfig
from draftsmith.train.metrics import num_ranks
from draftsmith.train.planning.estimate import TrainingPlan, planned_dtype
from draftsmith.train.planning.frozen import frozen_model
from draftsmith.train.planning.made_up import dialogue_lengths, write_responses
from draftsmith.train.prepare import TrainedConfig, prepare
from draftsmith.train.strategies import trainer_arguments
from draftsmith.train.telemetry import Telemetry

WARM_UP, TIMED = 3, 5


@dataclass(frozen=True)
class MeasuredSteps:
    """steps: that were timed. flops_per_s: model FLOPs over their time on one rank. tokens_per_s: of one rank.
    peak_bytes: of this process, models and libraries included. on_what: real or made-up data."""

    steps: int
    seconds: float
    flops_per_s: float
    tokens_per_s: float
    peak_bytes: int
    on_what: str

    def hours(self, plan: TrainingPlan) -> float:
        """Hours for all steps, by their FLOPs, as the timed ones may be of short documents; validation is not in it."""
        return plan.step_flops * plan.steps / plan.world / self.flops_per_s / 3600

    def text(self, plan: TrainingPlan) -> str:
        planned = plan.own.peak
        return (
            f"measured {self.steps} steps on {self.on_what}: {self.tokens_per_s:,.0f} tokens/s and "
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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch.last and trainer.global_step in (WARM_UP, trainer.max_steps):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self.numbers = self.telemetry.take(pl_module.device)


def measure_steps(config: TrainConfig, plan: TrainingPlan) -> MeasuredSteps:
    """Train for a few steps on the first batches; on made-up responses where the data is not there.

    Raises:
        InputError: as the training itself; or acceptance labels that are not there, which cannot be made up.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        own, on_what = short_run(config, Path(folder))
        assert isinstance(own, TrainedConfig)
        module, data, *_ = prepare(own)
        timing = Timing()
        trainer = pl.Trainer(
            **trainer_arguments(own),
            max_steps=own.max_steps,
            logger=False,
            callbacks=[timing.telemetry, timing],
            default_root_dir=folder,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
            trainer.fit(module, datamodule=data)
    found = timing.numbers
    seconds, tokens = TIMED / found["steps_per_s"], found["tokens_per_s"] / num_ranks()
    return MeasuredSteps(TIMED, seconds, found["mfu"], tokens, int(found["memory_gb"] * 1e9), on_what)


def short_run(config: TrainConfig, folder: Path) -> tuple[TrainConfig, str]:
    """The settings of a few steps that leave nothing behind, and what they train on."""
    changes: dict[str, Any] = {"output": folder / "run", "max_steps": WARM_UP + TIMED, "resume": False, "wandb": "off"}
    if isinstance(config, TrainDrafterConfig):
        changes |= {"tau_prompts": 0, "feature_cache": None}
    if hasattr(config, "unroll_after"):  # as at the end of the training, where all passes run
        changes["unroll_after"] = 0.0
    if (config.data / MANIFEST).exists():
        return dataclasses.replace(config, **changes), str(config.data)
    if not isinstance(config, TrainDrafterConfig):
        assert isinstance(config, TrainAcceptanceConfig)
        remedy = "Make it with data acceptance, or leave --measure out."
        raise InputError("data", f"no artefact at {config.data}", "labels to measure a training on", remedy)
    target = frozen_model(config.target, planned_dtype(config))
    steps = changes["max_steps"]
    number = config.batch_size * steps
    if config.tokens_per_batch:
        number = max(2, config.tokens_per_batch * steps // 400)
    lengths = [min(length, target.context) for length in dialogue_lengths(number)]
    data = write_responses(folder / "responses", config.target, lengths, target.vocab_size)
    return dataclasses.replace(config, **changes, data=data, val=None), f"{number} made-up dialogues"
