"""What a training has left in its output directory."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from draftsmith.train.checkpoints import FOLDER, STATE, all_in
from draftsmith.train.data import MicroBatch, SampleKey, Samples


def fake_trainer(dataset: Any, step: int = 0) -> Any:
    """What a `LitHead` asks of Lightning's trainer: its samples, which are all of a data set, and how far it is."""
    samples = Samples(dataset, range(len(dataset)))
    return SimpleNamespace(datamodule=SimpleNamespace(train=samples, val=samples), global_step=step)


def micro_batch(data: Any, tokens: float, indices: Any = None, epoch: int = 0) -> MicroBatch:
    """A collated batch as a whole step of one rank; the samples are the first ones unless `indices` says which."""
    mask = getattr(data, "attention_mask", None)
    mask = data.loss_mask if mask is None else mask
    lengths = getattr(data, "lengths", None) or tuple(mask.sum(-1).tolist())
    keys = tuple(SampleKey(epoch, i) for i in (range(len(lengths)) if indices is None else indices))
    return MicroBatch(data, keys, lengths, tokens)


def step_loss(module: Any, batch: MicroBatch) -> Any:
    """Output of a module's loss in a training step."""
    return module.loss(module.read(batch)[0], module.train_step(batch))


def validate(module: Any, parts: Iterable[MicroBatch]) -> dict[str, float]:
    """Metrics of a module over these validation batches."""
    module.on_validation_epoch_start()
    with torch.no_grad():
        for part in parts:
            module.validation_step(part, 0)
    return module.validation_metrics()


def newest_state(output: Path) -> dict[str, Any]:
    """The content of the newest checkpoint."""
    return torch.load(all_in(output / FOLDER)[-1] / STATE, weights_only=True)


def weights(output: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(output / name / "model.safetensors")


def losses(output: Path, column: str = "train/loss") -> list[float]:
    """One for each row that has it."""
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]
