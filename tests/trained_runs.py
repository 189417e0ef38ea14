"""What a training has left in its output directory."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from draftsmith.train.checkpoints import FOLDER, STATE, all_in
from draftsmith.train.data_module import Samples


def fake_trainer(dataset: Any, step: int = 0) -> Any:
    """What a `LitHead` asks of Lightning's trainer: its samples, which are all of a data set, and how far it is."""
    samples = Samples(dataset, range(len(dataset)))
    return SimpleNamespace(datamodule=SimpleNamespace(train=samples, val=samples), global_step=step)


def newest_state(output: Path) -> dict[str, Any]:
    """The content of the newest checkpoint."""
    return torch.load(all_in(output / FOLDER)[-1] / STATE, weights_only=True)


def weights(output: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(output / name / "model.safetensors")


def losses(output: Path, column: str = "train/loss") -> list[float]:
    """One for each row that has it."""
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]
