"""Devices, ranks and strategy of a training, from its config and the launcher's environment."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from draftsmith.data.ranks import place
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig

C = TypeVar("C", bound=TrainConfig)


def device_kind(config: TrainConfig) -> str:
    """Return cpu or gpu. A GPU that is asked for need not exist, as a plan may be for another machine."""
    if config.device != "auto":
        return {"cuda": "gpu"}.get(config.device, config.device)
    return "gpu" if torch.cuda.device_count() else "cpu"


def _devices(config: TrainConfig) -> tuple[int, int]:
    """Return processes per machine, and machines: those that a launcher has started, else the config's.

    Raises:
        InputError: the launcher started unequal numbers of processes on its machines.
    """
    process = place()
    if not process.launched:
        return config.devices, 1
    if process.world % process.local_world:
        found = f"{process.local_world} of {process.world} processes on this machine"
        raise InputError("WORLD_SIZE", found, "as many on every machine", "Start as many on each.")
    return process.local_world, process.world // process.local_world


def world_size(config: TrainConfig) -> int:
    """Return the number of ranks."""
    devices, nodes = _devices(config)
    return devices * nodes


def local_device(config: TrainConfig) -> str:
    """Return the device of this process. Frozen models are loaded straight to it, before Lightning is set up.

    Raises:
        InputError: fewer GPUs than asked for.
    """
    if device_kind(config) == "cpu":
        return "cpu"
    available, needed = torch.cuda.device_count(), _devices(config)[0]
    if available < needed:
        raise InputError("devices", f"{available} CUDA devices", str(needed), "Pass --device cpu.")
    return f"cuda:{place().local_rank}"


def process_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resolve_precision(config: C) -> C:
    """Replace precision `auto` by bf16 or 32, so that a run records it: resuming on another device is then an error."""
    if config.precision != "auto":
        return config
    # A GPU that does not exist here is taken to have bf16.
    able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return dataclasses.replace(config, precision="bf16" if device_kind(config) == "gpu" and able else "32")


@contextmanager
def tensor_cores(config: TrainConfig) -> Iterator[None]:
    """Compute float32 products in TF32 on a GPU, within this context only: decoding keeps float32."""
    before = torch.get_float32_matmul_precision()
    if device_kind(config) == "gpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def trainer_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return Lightning Trainer's arguments for devices and strategy, with everything switched off that we do ourselves.

    Precision is not among them: weights are float32 everywhere, and the training step switches autocast on.

    Raises:
        InputError: a strategy that does not fit the optimizer, or whose package is not installed.
    """
    # Lightning refuses GPUs that are not there.
    kind, (devices, nodes) = device_kind(config), _devices(config)
    return {
        "accelerator": kind,
        "devices": devices,
        "num_nodes": nodes,
        "strategy": _strategy(config, kind, devices * nodes),
        "plugins": [_environment()],
        # The data module counts all steps as one epoch, whose batches are steps.
        "max_epochs": 1,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        # The module logs; a larger number only warns about short runs.
        "log_every_n_steps": 1,
        # The data module knows its rank.
        "use_distributed_sampler": False,
    }


def _strategy(config: TrainConfig, kind: str, world: int) -> Any:
    name = config.strategy
    if name.startswith("deepspeed"):
        if config.optimizer == "muon":
            remedy = "Pass --optimizer adamw, or --strategy ddp."
            raise InputError("optimizer", f"muon with {name}", "adamw: Muon needs whole matrices", remedy)
        from draftsmith.train.deepspeed import ZeroStrategy

        # deepspeed_stage_2_offload -> 2.
        stage = int(name.removeprefix("deepspeed_stage_")[0])
        return ZeroStrategy(stage, name.endswith("offload"), config.clip, kind)
    if name == "ddp" or world > 1:
        from lightning.pytorch.strategies import DDPStrategy

        # Buffers are constants, and ranks validate unequally many batches: their forward must not communicate.
        return DDPStrategy(process_group_backend="gloo" if kind == "cpu" else "nccl", broadcast_buffers=False)
    return "auto"


def _environment() -> Any:
    """Return the plugin that gives Lightning the ranks, under torchrun's names whatever launcher has set them.

    Lightning's own detection errs: it takes a batch script of SLURM for one of several processes.
    """
    from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    process = place()
    if not process.launched:
        return LightningEnvironment()
    names = {"RANK": process.rank, "WORLD_SIZE": process.world}
    names |= {"LOCAL_RANK": process.local_rank, "LOCAL_WORLD_SIZE": process.local_world}
    os.environ |= {name: str(value) for name, value in names.items()}
    return TorchElasticEnvironment()
