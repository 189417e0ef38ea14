"""Devices and strategy, from the config and the launcher's environment."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.strategies import resolve_precision, tensor_cores, trainer_arguments


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "RANK", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)


def config(tmp_path, **changes) -> TrainConfig:
    return TrainConfig(data=tmp_path, output=tmp_path, accelerator="cpu", **changes)


def test_torchrun_sets_the_number_of_ranks(tmp_path, monkeypatch):
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    arguments = trainer_arguments(config(tmp_path, devices=1))
    assert (arguments["devices"], arguments["num_nodes"]) == (4, 2)


def test_precision_depends_on_the_device(tmp_path, monkeypatch):
    """bf16 on a GPU that has it, with TF32 while it trains; an explicit setting is kept."""
    gpu = TrainConfig(data=tmp_path, output=tmp_path, accelerator="gpu")
    assert (resolve_precision(config(tmp_path)).precision, resolve_precision(gpu).precision) == ("32", "bf16")
    assert resolve_precision(config(tmp_path, precision="bf16")).precision == "bf16"
    assert resolve_precision(dataclasses.replace(gpu, precision="32")).precision == "32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert resolve_precision(gpu).precision == "32"
    before = torch.get_float32_matmul_precision()
    with tensor_cores(config(tmp_path)):
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
    arguments = trainer_arguments(config(tmp_path))
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
    strategy = trainer_arguments(config(tmp_path, strategy=name, clip=0.5))["strategy"]
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == stage and ("offload_optimizer" in zero) == offload
    assert ("offload_param" in zero) == (offload and stage == 3)
    assert strategy.config["gradient_clipping"] == 0.5 and strategy.process_group_backend == "gloo"
    assert not any(kind in strategy.config for kind in ("bf16", "fp16"))


def test_muon_needs_whole_matrices(tmp_path):
    with pytest.raises(InputError, match=r"muon with deepspeed_stage_1.*Muon needs whole matrices"):
        trainer_arguments(config(tmp_path, strategy="deepspeed_stage_1", optimizer="muon"))


def test_without_deepspeed_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError, match=r'pip install "draftsmith\[deepspeed\]"'):
        trainer_arguments(config(tmp_path, strategy="deepspeed_stage_2"))
