"""What a rank holds under each strategy, from what one process holds in a dry held.

A step's peak is not the sum of its parts: activations are gone before the optimiser begins. So there is what stays
(weights, averages, buffers) and what comes and goes in phases; the peak is what stays and the largest phase. How ZeRO
shares out weights, gradients and averages is by formula (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.train.deepspeed import BUCKET
from draftsmith.train.planning.dry_run import GRADIENTS, WORKING, HeldBytes

FLOAT32 = 4
# What a CPU's malloc keeps of what a step has freed, as a share of its activations: 7 to 10 % by a simulation of
# glibc's heap (malloc(3), mallopt(3)) beside dry steps of drafters on Llamas of 90 million parameters.
CPU_KEEPS = 0.08
Strategy = Literal["one process", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
Layout = tuple[Strategy, bool]
# What a plan compares: a strategy, and whether what it shares out lies in host memory. With column titles that fit side
# by side into 80 columns.
LAYOUTS: dict[Layout, str] = {
    ("one process", False): "alone",
    ("ddp", False): "ddp",
    ("deepspeed_stage_1", False): "zero-1",
    ("deepspeed_stage_2", False): "zero-2",
    ("deepspeed_stage_3", False): "zero-3",
    ("deepspeed_stage_2", True): "z2-off",
    ("deepspeed_stage_3", True): "z3-off",
}


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


def trained(whole: int, averages: int, update: int, layout: Layout, world: int) -> Trained:
    """whole: weights, float32, and as many gradients; averages and update: the optimizer's, of one process.

    ddp reduces gradients in buckets as large as themselves. Stages 1 and 2 keep every weight, and a rank's part of a
    second copy that the optimiser steps on; stage 2 keeps a rank's part of the gradients; stage 3 of the weights too,
    which it gathers for forward and backward. All of them reduce gradients by a bucket at a time.
    """
    strategy, offload = layout
    if not strategy.startswith("deepspeed"):
        return Trained(whole, whole, averages, buffers=whole if strategy == "ddp" else 0, update=update)
    stage, part = int(strategy[-1]), FLOAT32 * -(-whole // FLOAT32 // world)
    stepped, update = part + -(-averages // world), -(-update // world)
    return Trained(
        weights=part if stage == 3 else whole,
        gradients=whole if stage == 1 else part,
        optimizer=0 if offload else stepped,
        buffers=min(whole, FLOAT32 * BUCKET),
        gathered=whole if stage == 3 else 0,
        update=update + (part if stage == 1 else 0),
        host=part + stepped if offload else 0,
    )


def memory(held: HeldBytes, accumulate: int, layout: Layout, world: int) -> Memory:
    """The peak of one rank and where it comes from. world: ranks that compute as many parts at once.

    accumulate: parts of a step, which are in memory together, with the samples that the last of them is made of.
    """
    working = {phase: peak.get(WORKING, 0) for phase, peak in held.peaks.items()}
    kept = {phase: round(CPU_KEEPS * size) if held.libraries else 0 for phase, size in working.items()}
    own = trained(held.weights, held.optimizer, working["update"], layout, world)
    batch = (accumulate + 1) * held.batch
    stays = held.libraries + held.frozen + own.weights + own.optimizer + own.buffers + batch
    phases = {
        "loading": held.libraries + held.loading,
        "update": stays + own.gradients + own.update + kept["update"],
        "saving": stays + own.gradients + held.weights,  # the head is made into bytes beside the last gradients
    }
    for phase in ("forward", "backward"):
        gradients = held.peaks[phase].get(GRADIENTS, 0) * own.gradients // held.weights
        phases[phase] = stays + own.gathered + gradients + working[phase] + kept[phase]
    phase = max(phases, key=phases.__getitem__)
    shown = phase if phase in held.peaks else "forward"
    parts = {
        "libraries": held.libraries,
        "frozen": held.frozen,
        "weights": own.weights + own.gathered,
        "gradients": own.gradients + own.buffers,
        "optimizer": own.optimizer,
        "activations": working[shown],
        "batch": batch,
        "freed, kept": kept[shown],
    }
    return Memory(parts, phases, phase, phases[phase], own.host)
