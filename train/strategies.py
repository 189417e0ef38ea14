"""How many devices work together: the one place that knows. Another way (DeepSpeed, a cluster) is added here."""

from __future__ import annotations

import os
from typing import Any

import torch

from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig


def accelerator(config: TrainConfig) -> str:
    """cpu or gpu, resolved.

    Raises:
        InputError: when a GPU is asked for and there is none, or fewer than asked for.
    """
    available = torch.cuda.device_count()
    if config.accelerator == "cpu" or (config.accelerator == "auto" and not available):
        return "cpu"
    if available < _local_world_size(config):
        raise InputError(
            "devices", f"{available} CUDA devices", str(_local_world_size(config)), "Pass --accelerator cpu."
        )
    return "gpu"


def _local_world_size(config: TrainConfig) -> int:
    """Processes on this machine: what torchrun started, else what the config asks for."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.devices))


def _num_nodes(config: TrainConfig) -> int:
    world = int(os.environ.get("WORLD_SIZE", 0)) if "LOCAL_WORLD_SIZE" in os.environ else 0
    return max(1, world // _local_world_size(config))


def local_device(config: TrainConfig) -> str:
    """The device of this process, before Lightning has set anything up: frozen models are loaded straight to it."""
    if accelerator(config) == "cpu":
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


def model_dtype(config: TrainConfig) -> str:
    """Type of the frozen model's weights: on a CPU float32 is faster than bf16 at the row counts of small models."""
    if config.model_dtype == "auto" and accelerator(config) == "cpu":
        return "float32"
    return config.model_dtype


def trainer_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of Lightning's Trainer that say where it runs."""
    from lightning.pytorch.strategies import DDPStrategy

    kind, devices, nodes = accelerator(config), _local_world_size(config), _num_nodes(config)
    strategy: Any = "auto"
    if config.strategy == "ddp" or devices * nodes > 1:
        strategy = DDPStrategy(process_group_backend="gloo" if kind == "cpu" else "nccl")
    return {
        "accelerator": kind,
        "devices": devices,
        "num_nodes": nodes,
        "strategy": strategy,
        "precision": {"32": "32-true", "bf16": "bf16-mixed"}[config.precision],
    }
