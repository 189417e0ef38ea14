"""Which process of how many this is: the one place that reads what a launcher has set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.modules.types import InputError

REMEDY = "Launch with draftsmith launch, or torchrun."


@dataclass(frozen=True)
class ProcessPlace:
    """A process among those of its job, and among those of its machine.

    launched: a launcher outside of this process started all of them.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launched: bool = False


def place(environment: Mapping[str, str] | None = None) -> ProcessPlace:
    """The place that torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), the DeepSpeed launcher (LOCAL_SIZE in
    place of the last) or srun (SLURM_*) say; rank 0 of 1 without any of them.

    torchrun inside of an srun step counts: what it sets is nearer to the process.

    Raises:
        InputError: the variables are no numbers, or do not fit together.
    """
    env = os.environ if environment is None else environment
    try:
        if "RANK" in env:
            world = int(env.get("WORLD_SIZE", 1))
            local_world = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", world)))
            found = ProcessPlace(int(env["RANK"]), world, int(env.get("LOCAL_RANK", 0)), local_world, True)
        elif in_srun(env):
            # SLURM_NTASKS may still be the whole job's; SLURM_STEP_* are this step's.
            world = int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
            found = ProcessPlace(
                int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), _tasks_here(env, world), True
            )
        else:
            return ProcessPlace(local_rank=int(env.get("LOCAL_RANK", 0)))  # Lightning's own subprocesses have it
    except (ValueError, KeyError, IndexError) as error:
        raise InputError("RANK, WORLD_SIZE", repr(error), "what a launcher sets, integers", REMEDY) from error
    if not 0 <= found.rank < found.world:
        raise InputError("RANK", found.rank, f"0 <= RANK < WORLD_SIZE = {found.world}", REMEDY)
    if not 0 <= found.local_rank < found.local_world <= found.world:
        expected = f"0 <= LOCAL_RANK < LOCAL_WORLD_SIZE = {found.local_world} <= WORLD_SIZE = {found.world}"
        raise InputError("LOCAL_RANK", found.local_rank, expected, REMEDY)
    return found


def in_srun(env: Mapping[str, str]) -> bool:
    """True in a task that srun started; the batch script itself runs alone, although it has a SLURM_PROCID.

    Batch scripts and interactive shells have no step id, or one of the last sixteen of 32 bits.
    """
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit() and int(env["SLURM_STEP_ID"]) < 2**32 - 16


def _tasks_here(env: Mapping[str, str], world: int) -> int:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, which reads `2(x3),1` for 2, 2, 2 and 1 tasks."""
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={per_node}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(env.get("SLURM_NODEID", 0))]
