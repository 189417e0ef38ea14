"""Where training runs, from the config and from what torchrun sets."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.strategies import accelerator, model_dtype, trainer_arguments


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)


def config(tmp_path, **changes) -> TrainConfig:
    return TrainConfig(data=tmp_path, output=tmp_path, accelerator="cpu", **changes)


def test_one_device_needs_no_strategy(tmp_path):
    arguments = trainer_arguments(config(tmp_path))
    assert (arguments["devices"], arguments["num_nodes"], arguments["strategy"]) == (1, 1, "auto")


def test_several_cpu_processes_talk_through_gloo(tmp_path):
    from lightning.pytorch.strategies import DDPStrategy

    strategy = trainer_arguments(config(tmp_path, devices=2))["strategy"]
    assert isinstance(strategy, DDPStrategy) and strategy.process_group_backend == "gloo"


def test_torchrun_decides_how_many_there_are(tmp_path, monkeypatch):
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    arguments = trainer_arguments(config(tmp_path, devices=1))
    assert (arguments["devices"], arguments["num_nodes"]) == (4, 2)


def test_more_gpus_than_there_are_is_an_error(tmp_path):
    wanted = torch.cuda.device_count() + 1
    with pytest.raises(InputError, match="devices: found"):
        accelerator(TrainConfig(data=tmp_path, output=tmp_path, accelerator="gpu", devices=wanted))


def test_frozen_models_are_float32_on_a_cpu(tmp_path):
    assert model_dtype(config(tmp_path)) == "float32"
    assert model_dtype(config(tmp_path, model_dtype="bfloat16")) == "bfloat16"
