"""Sums, counts and rows over all ranks. Without a process group they are those of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.modules.pretrained.ranks import place
from draftsmith.modules.types import LossOutput

T = TypeVar("T")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; before the process group exists, by what the launcher has set."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    here = place()
    # Lightning's own subprocesses have only a local rank.
    return here.rank or here.local_rank


def say_on_rank_zero(text: str) -> None:
    """Print a line to stderr from one process only, also before the process group exists."""
    if rank() == 0:
        log_note(text)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise sum over ranks, of tensors of one shape on the device that ranks communicate through."""
    if num_ranks() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_rows(rows: Tensor) -> Tensor:
    """Gather [N_rank, C] of each rank to [sum of N_rank, C] on every rank, in order of ranks."""
    return torch.cat([part.to(rows.device) for part in gathered(rows.cpu())]) if num_ranks() > 1 else rows


def gathered(own: T) -> list[T]:
    """Gather plain values or CPU tensors of all ranks, in order of ranks."""
    if num_ranks() == 1:
        return [own]
    parts: list[Any] = [None] * num_ranks()
    dist.all_gather_object(parts, own)
    return parts


class Means:
    """Running sums and counts. A mean is a ratio of sums over batches and ranks, never a mean of means."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, output: LossOutput, only_finite: bool = False) -> None:
        """Add a batch's sums and counts, without waiting for the device. only_finite: add zeros if the loss is not
        finite, which would spoil every mean."""
        keep = output.loss.detach().isfinite()
        for totals, values in ((self.sums, output.sums), (self.counts, output.counts)):
            for name, value in values.items():
                value = value.detach().double()
                if only_finite:
                    value = torch.where(keep.to(value.device), value, 0)
                totals[name] = totals[name].to(value.device) + value if name in totals else value

    def take(self) -> dict[str, float]:
        """Return the means over all ranks since the last call; all of them must call it."""
        state = self.state()
        self.sums, self.counts = {}, {}
        return {name: value / count for name, (value, count) in state.items() if count > 0}

    def state(self) -> dict[str, list[float]]:
        """Return name -> [sum, count] over all ranks; all of them must call it.

        A rank may have nothing to add, or other names: fewer validation samples than ranks, or none that counts.
        """
        names = sorted(self.sums)
        pairs = [torch.stack([self.sums[name], self.counts[name]]) for name in names]
        own = dict(zip(names, torch.stack(pairs).tolist(), strict=True)) if pairs else {}
        parts = gathered(own)
        return {
            name: [sum(values) for values in zip(*(part[name] for part in parts if name in part), strict=True)]
            for name in sorted(set().union(*parts))
        }

    def load(self, state: Mapping[str, list[float]]) -> None:
        """Add a saved state."""
        sums = {name: torch.tensor(value, dtype=torch.float64) for name, (value, _) in state.items()}
        counts = {name: torch.tensor(count, dtype=torch.float64) for name, (_, count) in state.items()}
        self.add(LossOutput(torch.zeros(()), sums, counts))
