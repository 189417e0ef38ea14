"""How many devices work together, and how: the one place that knows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from draftsmith.data.ranks import ProcessPlace, place
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig

C = TypeVar("C", bound=TrainConfig)


def device_kind(config: TrainConfig) -> str:
    """cpu or gpu; for a plan, a GPU that is asked for need not be here."""
    if config.accelerator != "auto":
        return config.accelerator
    return "gpu" if torch.cuda.device_count() else "cpu"


def accelerator(config: TrainConfig) -> str:
    """cpu or gpu.

    Raises:
        InputError: when a GPU is asked for and there is none, or fewer than asked for.
    """
    kind, available = device_kind(config), torch.cuda.device_count()
    if kind == "gpu" and available < _devices(config)[0]:
        raise InputError("devices", f"{available} CUDA devices", str(_devices(config)[0]), "Pass --accelerator cpu.")
    return kind


def _devices(config: TrainConfig) -> tuple[int, int]:
    """Processes on this machine, and machines: what a launcher has started, else what the config asks for.

    Raises:
        InputError: the launcher started unequal numbers of processes on its machines.
    """
    found = place()
    if not found.launched:
        return config.devices, 1
    if found.world % found.local_world:
        expected = "as many on every machine"
        raise InputError("WORLD_SIZE", f"{found.local_world} of {found.world} processes here", expected, "Start so.")
    return found.local_world, found.world // found.local_world


def world_size(config: TrainConfig) -> int:
    """Processes that train together."""
    devices, nodes = _devices(config)
    return devices * nodes


def local_device(config: TrainConfig) -> str:
    """The device of this process, before Lightning has set anything up: frozen models are loaded straight to it."""
    return "cpu" if accelerator(config) == "cpu" else f"cuda:{place().local_rank}"


def model_dtype(config: TrainConfig) -> str:
    """Type of the frozen model's weights: on a CPU float32 is faster than bf16 at the row counts of small models."""
    return "float32" if config.model_dtype == "auto" and device_kind(config) == "cpu" else config.model_dtype


def settled(config: C) -> C:
    """The config with its precision said, as a run records it: continued on another device it is an error, and not
    another training."""
    if config.precision != "auto":
        return config
    # A GPU that is only planned for is taken for one of today's.
    able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return dataclasses.replace(config, precision="bf16" if device_kind(config) == "gpu" and able else "32")


@contextmanager
def tensor_cores(config: TrainConfig) -> Iterator[None]:
    """On a GPU float32 products are TF32 here; what decodes elsewhere in the process keeps float32."""
    before = torch.get_float32_matmul_precision()
    if device_kind(config) == "gpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def trainer_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of Lightning's Trainer that say where and how it runs, and what it leaves to us. Precision is not
    among them: weights are float32 everywhere, and the training step switches autocast on.

    Raises:
        InputError: a strategy that does not fit the optimiser, or whose package is not installed.
    """
    kind, (devices, nodes) = accelerator(config), _devices(config)
    return {
        "accelerator": kind,
        "devices": devices,
        "num_nodes": nodes,
        "strategy": _strategy(config, kind, devices * nodes),
        "plugins": [_environment(place())],
        "max_epochs": 1,
        "accumulate_grad_batches": config.accumulate,
        "limit_val_batches": 0,  # callbacks.BetweenSteps validates
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,  # BetweenSteps logs; a larger number only warns about short runs
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,  # the data module knows its rank
    }


def _strategy(config: TrainConfig, kind: str, world: int) -> Any:
    name = config.strategy
    if name.startswith("deepspeed"):
        if config.optimizer == "muon":
            remedy = "Pass --optimizer adamw, or --strategy ddp."
            raise InputError("optimizer", f"muon with {name}", "adamw: Muon needs whole matrices", remedy)
        from draftsmith.train.deepspeed import ZeroStrategy

        stage = int(name.removeprefix("deepspeed_stage_")[0])
        return ZeroStrategy(stage, name.endswith("offload"), config.clip, kind)
    if name == "ddp" or world > 1:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(process_group_backend="gloo" if kind == "cpu" else "nccl")
    return "auto"


def _environment(found: ProcessPlace) -> Any:
    """What tells Lightning the ranks, whichever launcher has set them: they are given torchrun's names. It is not left
    to find out by itself: a batch script of SLURM, for one, looks to it like one of several processes."""
    from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    if not found.launched:
        return LightningEnvironment()
    names = {"RANK": found.rank, "WORLD_SIZE": found.world}
    names |= {"LOCAL_RANK": found.local_rank, "LOCAL_WORLD_SIZE": found.local_world}
    os.environ |= {name: str(value) for name, value in names.items()}
    return TorchElasticEnvironment()
