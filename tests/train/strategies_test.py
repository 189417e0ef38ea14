"""Devices, precision and strategy of a training, and its steps and batches on every device."""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rank_jobs import run_on_ranks
from trainings import config, losses, weights
from worlds import DEVICES

from draftsmith.data.store.datasets import open_dataset, pack_features
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.types import InputError
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import HeadDataModule, SampleKey, Samples
from draftsmith.train.strategies import resolve_precision, tensor_cores, trainer_arguments


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "RANK", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)


def settings(tmp_path, **changes) -> TrainConfig:
    return TrainConfig(data=tmp_path, output=tmp_path, device="cpu", **changes)


def test_torchrun_sets_the_number_of_ranks(tmp_path, monkeypatch):
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    arguments = trainer_arguments(settings(tmp_path, devices=1))
    assert (arguments["devices"], arguments["num_nodes"]) == (4, 2)


def test_precision_depends_on_the_device(tmp_path, monkeypatch):
    """bf16 on a GPU that has it, with TF32 while it trains; an explicit setting is kept."""
    gpu = TrainConfig(data=tmp_path, output=tmp_path, device="cuda")
    assert (resolve_precision(settings(tmp_path)).precision, resolve_precision(gpu).precision) == ("32", "bf16")
    assert resolve_precision(settings(tmp_path, precision="bf16")).precision == "bf16"
    assert resolve_precision(dataclasses.replace(gpu, precision="32")).precision == "32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert resolve_precision(gpu).precision == "32"
    before = torch.get_float32_matmul_precision()
    with tensor_cores(settings(tmp_path)):
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError), tensor_cores(gpu):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


def test_ranks_of_srun_reach_lightning_under_torchruns_names(tmp_path, monkeypatch):
    slurm = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 5, "SLURM_NTASKS": 6, "SLURM_LOCALID": 2}
    slurm |= {"SLURM_NODEID": 1, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, str(value))
    arguments = trainer_arguments(settings(tmp_path))
    (environment,) = arguments["plugins"]
    assert (arguments["devices"], arguments["num_nodes"]) == (3, 2)
    assert (environment.global_rank(), environment.world_size(), environment.local_rank()) == (5, 6, 2)
    assert environment.creates_processes_externally


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("deepspeed_stage_1", 1, False),
        ("deepspeed_stage_2_offload", 2, True),
        ("deepspeed_stage_3", 3, False),
        ("deepspeed_stage_3_offload", 3, True),
    ],
)
def test_zero_stages_by_name(tmp_path, name, stage, offload):
    strategy = trainer_arguments(settings(tmp_path, strategy=name, clip=0.5))["strategy"]
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == stage and ("offload_optimizer" in zero) == offload
    assert ("offload_param" in zero) == (offload and stage == 3)
    assert strategy.config["gradient_clipping"] == 0.5 and strategy.process_group_backend == "gloo"
    assert not any(kind in strategy.config for kind in ("bf16", "fp16"))


def test_muon_needs_whole_matrices(tmp_path):
    with pytest.raises(InputError, match=r"muon with deepspeed_stage_1.*Muon needs whole matrices"):
        trainer_arguments(settings(tmp_path, strategy="deepspeed_stage_1", optimizer="muon"))


def test_without_deepspeed_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError, match=r'pip install "draftsmith\[deepspeed\]"'):
        trainer_arguments(settings(tmp_path, strategy="deepspeed_stage_2"))


SHORT = {"max_steps": 3, "val_every": 3, "log_every": 1, "tokens_per_batch": 256, "batch_size": 1}
KINDS = {"cpu": ("cpu", "'32'"), "cuda": ("gpu", "bf16")}
# DeepSpeed is no part of what a borrowed machine has to have.
STRATEGIES = ["ddp", *([f"deepspeed_stage_{stage}" for stage in (1, 2, 3)] if find_spec("deepspeed") else [])]


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
    run(config(artifacts, tmp_path / "run", device=kind, **SHORT))
    check_run(tmp_path / "run", precision)


# On CPUs: ranks_test.py.
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_every_strategy_takes_steps_on_one_device(artifacts, tmp_path, device):
    """In a process of its own, as a process group stays."""
    kind, precision = KINDS[device]
    jobs = [
        {
            "head": "eagle",
            "config": {key: value for key, value in dataclasses.asdict(made).items() if value is not None},
        }
        for name in STRATEGIES
        for made in [config(artifacts, tmp_path / name, device=kind, strategy=name, **SHORT)]
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
        device="cuda" if device == "cuda" else "cpu",
    )  # fmt: skip
    count = partial(EagleHead.loss_count, settings=EagleHead.Settings())
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
