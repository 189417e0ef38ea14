"""What a rank holds under each strategy, from what one process holds in a dry step.

A step's peak is not the sum of its parts: activations are gone before the optimiser begins. So there is what stays
(weights, averages, buffers) and what comes and goes in phases; the peak is what stays and the largest phase. How ZeRO
shares out weights, gradients and averages is by formula (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.train.planning.dry_run import WORKING
from draftsmith.train.planning.step import GRADIENTS, StepBytes

FLOAT32 = 4
# Elements that ZeRO reduces at once, in a buffer of their own; train/deepspeed.py sets it.
ZERO_BUCKET = 50_000_000
Strategy = Literal["one process", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
# What a plan compares: a strategy, and whether what it shares out lies in host memory. With column titles that fit side
# by side into 80 columns.
LAYOUTS: dict[tuple[Strategy, bool], str] = {
    ("one process", False): "alone",
    ("ddp", False): "ddp",
    ("deepspeed_stage_1", False): "zero-1",
    ("deepspeed_stage_2", False): "zero-2",
    ("deepspeed_stage_3", False): "zero-3",
    ("deepspeed_stage_2", True): "z2-off",
    ("deepspeed_stage_3", True): "z3-off",
}


@dataclass(frozen=True)
class Resident:
    """Bytes of a rank that do not depend on the strategy. base: interpreter and libraries, where the device is the CPU.
    frozen: frozen models as they stay; loading: most while they are read, themselves included."""

    base: int
    frozen: int
    loading: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part, the phase in which they are most, and that peak.

    host: what an offloading strategy keeps in the CPU's memory instead of the device's.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    phase: str
    peak: int
    host: int = 0


@dataclass(frozen=True)
class Trained:
    """Bytes of the trained parameters' own state on one rank.

    weights, optimizer, buffers stay; gradients live from the backward pass to the next one; gathered is there during
    forward and backward; update is added while the optimiser steps. host: kept in the CPU's memory.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0
    gathered: int = 0
    update: int = 0
    host: int = 0


def trained(whole: int, averages: int, update: int, strategy: Strategy, world: int, offload: bool = False) -> Trained:
    """whole: weights, float32, and as many gradients; averages and update: the optimizer's, of one process.

    ddp reduces gradients in buckets as large as themselves. Stages 1 and 2 keep every weight, and a rank's part of a
    second copy that the optimiser steps on; stage 2 keeps a rank's part of the gradients; stage 3 of the weights too,
    which it gathers for forward and backward. All of them reduce gradients by a bucket at a time.
    """
    if strategy == "one process":
        return Trained(whole, whole, averages, update=update)
    if strategy == "ddp":
        return Trained(whole, whole, averages, buffers=whole, update=update)
    part = FLOAT32 * -(-whole // FLOAT32 // world)
    stepped = part + -(-averages // world)  # the rank's own copy of the weights, and its averages
    update = -(-update // world)
    host, kept = (part + stepped, 0) if offload else (0, stepped)
    bucket = min(whole, FLOAT32 * ZERO_BUCKET)
    if strategy == "deepspeed_stage_1":
        return Trained(whole, whole, kept, buffers=bucket, update=part + update, host=host)
    if strategy == "deepspeed_stage_2":
        return Trained(whole, part, kept, buffers=bucket, update=update, host=host)
    assert strategy == "deepspeed_stage_3", strategy
    return Trained(part, part, kept, buffers=bucket, gathered=whole, update=update, host=host)


def memory(
    resident: Resident, step: StepBytes, accumulate: int, strategy: Strategy, world: int, offload: bool = False
) -> Memory:
    """The peak of one rank and where it comes from. world: ranks that compute as many parts at once.

    accumulate: parts of a step, which are in memory together, with the samples that the last of them is made of.
    """
    update = step.peaks["update"]
    own = trained(step.weights, step.optimizer, update.parts[WORKING], strategy, world, offload)
    batch = (accumulate + 1) * step.batch
    stays = resident.base + resident.frozen + own.weights + own.optimizer + own.buffers + batch
    phases = {
        "loading": resident.base + resident.loading,
        "update": stays + own.gradients + own.update + update.freed,
        "saving": stays + own.gradients + step.weights,  # the head is made into bytes beside the last gradients
    }
    for phase in ("forward", "backward"):
        moment = step.peaks[phase]
        gradients = moment.parts.get(GRADIENTS, 0) * own.gradients // step.weights
        phases[phase] = stays + own.gathered + gradients + moment.parts[WORKING] + moment.freed
    phase = max(phases, key=phases.__getitem__)
    most = step.peaks[phase if phase in step.peaks else "forward"]
    parts = {
        "libraries": resident.base,
        "frozen": resident.frozen,
        "weights": own.weights + own.gathered,
        "gradients": own.gradients + own.buffers,
        "optimizer": own.optimizer,
        "activations": most.parts[WORKING],
        "batch": batch,
        "freed, kept": most.freed,
    }
    return Memory(parts, phases, phase, phases[phase], own.host)
