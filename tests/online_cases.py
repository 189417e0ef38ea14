"""Short trainings on responses, and their curves."""

from __future__ import annotations

import csv
from pathlib import Path

from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import ArtifactDataset
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.config import TrainDrafterConfig, drafter_config

QUICK = {
    "lr": 3e-3,
    "max_steps": 10,
    "batch_size": 8,
    "val_share": 0.25,
    "val_every": 5,
    "log_every": 1,
    "tau_prompts": 2,
    "tau_max_new_tokens": 8,
    "loggers": ("csv",),
}


def config(artifacts, output: Path, kind: str = "eagle", **changes) -> TrainDrafterConfig:
    settings = {"data": artifacts.responses, "target": str(artifacts.target), "output": output, **QUICK, **changes}
    if kind == "eagle":
        settings = {"token_weight": 1.0, **settings}
    return drafter_config(kind)(**settings)


def curve(output: Path, name: str = "train/loss") -> list[float]:
    with (output / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def texts(artifacts) -> ArtifactDataset:
    target = load_lm(str(artifacts.target))
    return text_dataset(artifacts.responses, str(artifacts.target), target.info.identity)
