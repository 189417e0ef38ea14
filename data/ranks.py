"""Which process of how many this is: the one place that reads what a launcher has set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.modules.types import InputError

REMEDY = "Launch with draftsmith launch, or torchrun."


@dataclass(frozen=True)
class Place:
    """A process among those of its job, and among those of its machine.

    launched: a launcher outside of this process started all of them.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launched: bool = False


def place(environment: Mapping[str, str] | None = None) -> Place:
    """As torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), the DeepSpeed launcher (LOCAL_SIZE in place of the
    last) or srun (SLURM_*) say it; rank 0 of 1 without any of them.

    Raises:
        InputError: the variables are no numbers, or do not fit together.
    """
    env = os.environ if environment is None else environment
    try:
        if "RANK" in env:
            world = int(env.get("WORLD_SIZE", 1))
            local_world = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", world)))
            found = Place(int(env["RANK"]), world, int(env.get("LOCAL_RANK", 0)), local_world, True)
        elif in_srun(env):
            world = int(env["SLURM_NTASKS"])
            nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", 1)))
            found = Place(int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), max(1, world // nodes), True)
        else:
            found = Place(local_rank=int(env.get("LOCAL_RANK", 0)))
    except ValueError as error:
        raise InputError("RANK, WORLD_SIZE", error, "integers", REMEDY) from error
    if not 0 <= found.rank < found.world:
        expected = f"0 <= RANK < WORLD_SIZE = {found.world}"
        raise InputError("RANK", found.rank, expected, REMEDY)
    return found


def in_srun(env: Mapping[str, str]) -> bool:
    """True in a task that srun started; the batch script itself has no step id and runs alone."""
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit() and int(env["SLURM_STEP_ID"]) < 2**32 - 16
