"""Rank and world size, from the launcher's environment. No other module reads a launcher's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.modules.types import InputError

# Set by `draftsmith launch` for its processes: the command that takes theirs behind it.
LAUNCHER = "DRAFTSMITH_LAUNCHER"


@dataclass(frozen=True)
class ProcessPlace:
    """Rank of a process in its job and on its machine. launched: a launcher started all of the job's processes."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launched: bool = False


def place(environment: Mapping[str, str] | None = None) -> ProcessPlace:
    """Return the rank that torchrun, the DeepSpeed launcher or srun set; rank 0 of 1 without any of them.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, DeepSpeed LOCAL_SIZE instead of the last, and srun
    SLURM_*. Inside an srun step torchrun's variables count: they are nearer to the process.

    Raises:
        InputError: the variables are no numbers, some are missing, or they do not fit together, as those that another
            program has left in a shell.
    """
    env = os.environ if environment is None else environment
    remedy = "Launch with draftsmith launch, or torchrun; or unset what is left over of another: unset RANK LOCAL_RANK."
    expected = "what a launcher sets, integers"
    try:
        here = _place(env)
    except (ValueError, KeyError, IndexError) as error:
        raise InputError("RANK, WORLD_SIZE", repr(error), expected, remedy) from error
    # A subprocess of Lightning's does not know the number of ranks yet, and has NODE_RANK.
    worlds = (here.world, here.local_world) if here.launched or "NODE_RANK" not in env else (1, here.local_rank + 1)
    for name, rank, world in zip(("RANK", "LOCAL_RANK"), (here.rank, here.local_rank), worlds, strict=True):
        if not 0 <= rank < world:
            raise InputError(name, f"{rank} among {world}, counted from 0", expected, remedy)
    return here


def pick_device(name: str) -> str:
    """Resolve `auto` to this rank's CUDA device, or the CPU without one; check any other name."""
    import torch

    from draftsmith.modules.pretrained.models import check_device

    if name == "auto":
        return f"cuda:{place().local_rank}" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name


def _place(env: Mapping[str, str]) -> ProcessPlace:
    """Read the variables, as `place`."""
    # torchrun and DeepSpeed, also within an srun step.
    if "RANK" in env:
        world = int(env.get("WORLD_SIZE", 1))
        local_world = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", world)))
        return ProcessPlace(int(env["RANK"]), world, int(env.get("LOCAL_RANK", 0)), local_world, True)
    # Batch scripts and interactive shells have a SLURM_PROCID too, but no step id, or one of the last sixteen of
    # 32 bits.
    if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_ID") or 2**32) < 2**32 - 16:
        # SLURM_NTASKS may still be the whole job's; SLURM_STEP_* belong to this step.
        world = int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
        # Tasks per node, `2(x3),1` for 2, 2, 2 and 1.
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
            counts += [int(count)] * int(times or 1)
        local_world = counts[int(env.get("SLURM_NODEID", 0))]
        return ProcessPlace(int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), local_world, True)
    # Lightning's own subprocesses have no RANK.
    return ProcessPlace(local_rank=int(env.get("LOCAL_RANK", 0)))
