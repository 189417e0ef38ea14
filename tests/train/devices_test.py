"""Training steps and their batches on every device."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from devices import DEVICES
from eagle_trainings import config
from rank_jobs import run_on_ranks
from trained_runs import losses, weights

from draftsmith.data.store.datasets import open_dataset, pack_features
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import HeadDataModule, SampleKey, Samples

SHORT = {"max_steps": 3, "val_every": 3, "log_every": 1, "tau_every": 3, "tokens_per_batch": 256, "batch_size": 1}
KINDS = {"cpu": ("cpu", "'32'"), "cuda": ("gpu", "bf16")}
# DeepSpeed is no part of what a borrowed machine has to have.
STRATEGIES = ["ddp", *(["deepspeed_stage_1", "deepspeed_stage_2"] if find_spec("deepspeed") else [])]


def check_run(output: Path, precision: str) -> None:
    """Losses are finite, weights too, tau was measured, and the precision is the device's own."""
    found = losses(output)
    assert len(found) == 3 and all(map(math.isfinite, found))
    assert losses(output, "val/tau")[-1] >= 1
    assert all(weight.isfinite().all() for weight in weights(output).values())
    assert f"\nprecision: {precision}\n" in (output / "config.yaml").read_text()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_taken_with_a_probe(artifacts, tmp_path, device):
    """On packed batches."""
    kind, precision = KINDS[device]
    run(config(artifacts, tmp_path / "run", accelerator=kind, **SHORT))
    check_run(tmp_path / "run", precision)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_strategy_takes_steps_on_one_device(artifacts, tmp_path, device):
    """In a process of its own, as a process group stays."""
    kind, precision = KINDS[device]
    jobs = [
        {
            "head": "eagle",
            "config": {key: value for key, value in dataclasses.asdict(made).items() if value is not None},
        }
        for name in STRATEGIES
        for made in [config(artifacts, tmp_path / name, accelerator=kind, strategy=name, **SHORT)]
    ]
    run_on_ranks(jobs, 1, tmp_path / "work")
    for name in STRATEGIES:
        check_run(tmp_path / name, precision)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_reach_a_device_as_they_were_read(artifacts, device, workers):
    """From pinned memory where it is a GPU, while graphs are captured in this thread."""
    dataset = open_dataset(artifacts.features)
    samples = Samples(dataset, range(6))
    settings = TrainConfig(
        data=Path("."), output=Path("."), batch_size=2, num_workers=workers,
        accelerator="gpu" if device == "cuda" else "cpu",
    )  # fmt: skip
    count = partial(EagleHead.loss_count, settings=None)
    module = HeadDataModule(samples, samples, settings, pack_features, count)
    keys = [(SampleKey(0, i), SampleKey(0, i + 1)) for i in range(5)]
    graphed = Graphed(lambda x: (x * 2,))
    for own, batch in zip(keys, module.batches(samples, keys), strict=True):
        assert tuple(batch.keys) == own and batch.data.input_ids.is_pinned() == (device == "cuda")
        expected = pack_features([dataset[key.index] for key in own])
        moved = batch.to(torch.device(device)).data
        for field in dataclasses.fields(expected):
            value, wanted = getattr(moved, field.name), getattr(expected, field.name)
            assert torch.equal(value.cpu(), wanted) if isinstance(wanted, torch.Tensor) else value == wanted
        size = torch.ones(own[0].index + 1, device=device)  # another shape each time: another capture
        assert graphed(size)[0].sum() == 2 * len(size)
