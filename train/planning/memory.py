"""How much memory a rank of a training takes, from sizes alone: numbers in, numbers out.

A step's peak is not the sum of its parts: activations are gone before the optimiser begins. So there is what stays
(weights, optimiser, gradients' buffers) and what comes and goes in phases; the peak is what stays and the largest
phase. What the formulas say of saved tensors is checked against torch's own in tests/train/planning/memory_test.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from torch import nn

FLOAT32 = 4
# Elements that ZeRO reduces at once, in a buffer of their own; train/deepspeed.py sets it.
ZERO_BUCKET = 50_000_000
Strategy = Literal["one process", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
# What a plan compares: a strategy, and whether what it shares out lies in host memory.
LAYOUTS: tuple[tuple[Strategy, bool], ...] = (
    ("one process", False),
    ("ddp", False),
    ("deepspeed_stage_1", False),
    ("deepspeed_stage_2", False),
    ("deepspeed_stage_3", False),
    ("deepspeed_stage_2", True),
    ("deepspeed_stage_3", True),
)


@dataclass(frozen=True)
class HeadSizes:
    """Elements of what is trained. matrices: in tensors of two dimensions or more; largest: in the largest tensor;
    largest_group: in all matrices of the shape that most of them have."""

    params: int
    matrices: int
    largest: int
    largest_group: int

    @classmethod
    def of(cls, head: nn.Module) -> HeadSizes:
        """Of a module, on the meta device or any other; what is shared counts once."""
        trained = [p for p in head.parameters() if p.requires_grad]
        groups: dict[tuple[int, ...], int] = {}
        for p in trained:
            if p.ndim >= 2:
                groups[tuple(p.shape)] = groups.get(tuple(p.shape), 0) + p.numel()
        return cls(
            params=sum(p.numel() for p in trained),
            matrices=sum(p.numel() for p in trained if p.ndim >= 2),
            largest=max(p.numel() for p in trained),
            largest_group=max(groups.values(), default=0),
        )


@dataclass(frozen=True)
class Sizes:
    """What a rank's memory depends on; all but `head` and `world` in bytes.

    base: interpreter and libraries, where the device is the CPU. frozen: the frozen model as it stays; loading: most
    while it is read, itself included. batch: of the parts that are in memory at once. inputs: what the loss function
    holds beside the saved tensors. activations: saved by the head for its gradient. widest: temporaries of the backward
    pass. loss: most that the loss itself takes. frozen_forward: most that the frozen model's forward takes, 0 where it
    does not run. world: ranks. accumulates: gradients are there before a part begins. on_cpu: the C library keeps freed
    blocks of up to 32 MiB for the next ones that fit, so what a backward pass has freed is still there when the loss
    takes its larger ones, which are not kept.
    """

    head: HeadSizes
    base: int
    frozen: int
    loading: int
    batch: int
    inputs: int
    activations: int
    widest: int
    loss: int
    frozen_forward: int
    optimizer: Literal["adamw", "muon"] = "adamw"
    strategy: Strategy = "one process"
    offload: bool = False
    world: int = 1
    accumulates: bool = False
    on_cpu: bool = False


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
    """Bytes of the trained parameters' own state on one rank: what stays, and what a step adds for a while.

    weights, optimizer, buffers stay; gradients live from the backward pass to the next step; gathered is there during
    forward and backward; update is there while the optimiser steps. host: kept in the CPU's memory.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0
    gathered: int = 0
    update: int = 0
    host: int = 0


def moments(sizes: HeadSizes, optimizer: str) -> int:
    """Bytes of the optimiser's averages: two of AdamW; Muon has one of matrices."""
    vectors = sizes.params - sizes.matrices
    return FLOAT32 * (2 * sizes.params if optimizer == "adamw" else sizes.matrices + 2 * vectors)


def update_bytes(sizes: HeadSizes, optimizer: str) -> int:
    """Temporaries of one optimiser step: AdamW's denominator of the largest tensor; Newton-Schulz of equal shapes:
    the stacked directions, the iterate and its product."""
    return FLOAT32 * (2 * sizes.largest if optimizer == "adamw" else 4 * sizes.largest_group)


def trained(sizes: HeadSizes, optimizer: str, strategy: str, world: int, offload: bool = False) -> Trained:
    """Weights, gradients and averages on one rank, all float32 (ZeRO, Rajbhandari et al. 2020, section 5).

    ddp reduces gradients in buckets as large as themselves. Stages 1 and 2 keep every weight, and a rank's part of a
    second copy that the optimiser steps on; stage 2 keeps a rank's part of the gradients; stage 3 of the weights too,
    which it gathers for forward and backward. All of them reduce gradients by a bucket at a time.
    """
    whole, part = FLOAT32 * sizes.params, FLOAT32 * -(-sizes.params // world)
    averages, update = moments(sizes, optimizer), update_bytes(sizes, optimizer)
    if strategy == "one process":
        return Trained(whole, whole, averages, update=update)
    if strategy == "ddp":
        return Trained(whole, whole, averages, buffers=whole, update=update)
    stepped = part + -(-averages // world)  # the rank's own copy of the weights, and its averages
    update = -(-update // world)
    host = part + stepped if offload else 0
    kept = 0 if offload else stepped
    bucket = FLOAT32 * min(sizes.params, ZERO_BUCKET)
    if strategy == "deepspeed_stage_1":
        return Trained(whole, whole, kept, buffers=bucket, update=part + update, host=host)
    if strategy == "deepspeed_stage_2":
        return Trained(whole, part, kept, buffers=bucket, update=update, host=host)
    assert strategy == "deepspeed_stage_3", strategy
    return Trained(part, part, kept, buffers=bucket, gathered=whole, update=update, host=host)


def memory(sizes: Sizes) -> Memory:
    """The peak of one rank and where it comes from."""
    own = trained(sizes.head, sizes.optimizer, sizes.strategy, sizes.world, sizes.offload)
    stays = sizes.base + sizes.frozen + own.weights + own.optimizer + own.buffers
    before = own.gradients if sizes.accumulates else 0
    working = sizes.batch + sizes.inputs + own.gathered
    whole = FLOAT32 * sizes.head.params
    freed = sizes.widest if sizes.on_cpu else 0
    phases = {
        "loading": sizes.base + sizes.loading,
        "loss": stays + before + working + sizes.activations + sizes.loss + freed,
        "backward": stays + before + working + sizes.activations + sizes.widest,
        "gradients": stays + own.gradients + working + sizes.widest,
        "update": stays + own.gradients + sizes.batch + own.update,
        # The head is made into bytes beside the gradients of the step before.
        "saving": stays + own.gradients + sizes.batch + whole,
    }
    if sizes.frozen_forward:
        phases["forward"] = stays + before + sizes.batch + own.gathered + sizes.frozen_forward
    phase = max(phases, key=phases.__getitem__)
    parts = {
        "libraries": sizes.base,
        "frozen": sizes.frozen,
        "weights": own.weights + own.gathered,
        "gradients": own.gradients + own.buffers,
        "optimizer": own.optimizer,
        "activations": sizes.activations + sizes.inputs,
        "loss": sizes.loss,
        "forward": sizes.frozen_forward,
        "batch": sizes.batch,
        "freed, kept": freed,
    }
    return Memory(parts, phases, phase, phases[phase], own.host)


def with_strategy(sizes: Sizes, strategy: Strategy, world: int, offload: bool = False) -> Sizes:
    """The same run shared out in another way; `world` ranks compute `world` parts at once."""
    return dataclasses.replace(sizes, strategy=strategy, world=world, offload=offload)
