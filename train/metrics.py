"""Sums, means and bad steps over all ranks. Without a process group they are those of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftsmith.data.console import log_note
from draftsmith.data.ranks import place
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import InputError, LossOutput

T = TypeVar("T")

# More steps that are not finite end a run.
MOST_BAD_STEPS = 10
# Samples that an error about bad steps names.
NAMED = 20


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


@dataclass
class _Marks:
    """Marks of a micro-batch: 0 if its loss and gradients are finite, else NaN; the same of a frozen model's states."""

    samples: Sequence[int]
    mark: Tensor
    states: Tensor | None


class BadSteps:
    """Watches the micro-batches of each step and counts the steps that were skipped.

    count: skipped steps of this run and of those it resumes. samples: names of the samples in their bad micro-batches,
    on all ranks, in order of first appearance.
    """

    def __init__(self, frozen: str = "target"):
        """frozen: option that names the frozen model."""
        self.frozen, self.count = frozen, 0
        self.samples: list[str] = []
        self._parts: list[_Marks] = []

    def watch(self, module: nn.Module) -> None:
        """Look at every gradient as this rank computes it, before other ranks' and micro-batches' are added."""

        def mark(gradient: Tensor) -> None:
            if self._parts:
                part = self._parts[-1]
                part.mark = part.mark + gradient.sum().float() * 0

        for param in module.parameters():
            if param.requires_grad:
                param.register_hook(mark)

    def add(self, loss: Tensor, samples: Sequence[int], frozen_states: Tensor | None, begins_step: bool = True) -> None:
        """Add a micro-batch: its loss, numbers of its samples, and hidden states of the frozen model, if it ran.

        Its gradients follow. One number on the device marks each, which nothing waits for. Finite values whose sum
        overflows float32 count as bad, too.
        """
        states = None if frozen_states is None else frozen_states.detach().sum(dtype=torch.float32) * 0
        if begins_step:
            self._parts = []
        self._parts.append(_Marks(samples, loss.detach().float() * 0, states))

    def agree(self, norm: Tensor | None, name: Callable[[int], str]) -> tuple[bool, float]:
        """Return whether the step is bad on any rank, and the norm as a number. All ranks call it.

        norm: of the step's whole gradient, if it is known yet; the same on every rank. name: returns a sample's id.

        Raises:
            InputError: too many steps were bad. NonFinite: a frozen model's states are not finite.
        """
        marks = torch.stack([part.mark for part in self._parts])
        bad = sum_over_ranks(marks.isnan().any().double())
        known = torch.zeros_like(bad) if norm is None else norm.double()
        # The one wait for the device in a step.
        number, size = torch.stack([bad, known.to(bad.device)]).tolist()
        if not number and size - size == 0:
            return False, size
        self.add_step(name, everything=not number)
        return True, size

    def add_step(self, name: Callable[[int], str], everything: bool) -> None:
        """Count the running step as bad. everything: no micro-batch was bad by itself, but their sum is."""
        bad = [part for part in self._parts if everything or bool(part.mark.isnan())]
        broken = [part for part in bad if part.states is not None and bool(part.states.isnan())]
        # Names of the samples in these parts, on all ranks.
        frozen, samples = (
            list(chain.from_iterable(gathered([name(i) for part in parts for i in part.samples])))
            for parts in (broken, bad)
        )
        if frozen:
            raise NonFinite("hidden states", self.frozen, None).of(frozen)
        self.samples = list(dict.fromkeys([*self.samples, *samples]))
        self.count += 1
        if self.count > MOST_BAD_STEPS:
            more = f" and {len(self.samples) - NAMED} more" if len(self.samples) > NAMED else ""
            found = f"not finite in {self.count} steps, with samples {', '.join(self.samples[:NAMED])}{more}"
            remedy = "Look at these samples, or lower --lr."
            raise InputError("loss or gradient", found, f"{MOST_BAD_STEPS} such steps at most", remedy)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "samples": list(self.samples)}

    def load(self, state: dict[str, Any]) -> None:
        self.count, self.samples = state["count"], list(state["samples"])
