"""Steps with a loss or gradient that is not finite: if any rank sees one, all ranks skip it.

A frozen model whose states are not finite cannot be trained around, so the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import InputError
from draftsmith.train.data import SampleKey
from draftsmith.train.metrics import gathered, sum_over_ranks

# Samples that an error names.
NAMED = 20


@dataclass
class _Marks:
    """Marks of a micro-batch: 0 if its loss and gradients are finite, else NaN; the same of a frozen model's states."""

    keys: Sequence[SampleKey]
    mark: Tensor
    states: Tensor | None


class BadSteps:
    """Watches the micro-batches of each step and counts the steps that were skipped.

    count: skipped steps of this run and of those it resumes. samples: names of the samples in their bad micro-batches,
    on all ranks, in order of first appearance.
    """

    def __init__(self, limit: int, frozen: str = "target"):
        """limit: more bad steps than this end the run. frozen: option that names the frozen model."""
        self.limit, self.frozen, self.count = limit, frozen, 0
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

    def add(
        self, loss: Tensor, keys: Sequence[SampleKey], frozen_states: Tensor | None, begins_step: bool = True
    ) -> None:
        """Add a micro-batch: its loss, its samples, and hidden states of the frozen model, if it ran.

        Its gradients follow. One number on the device marks each, which nothing waits for. Finite values whose sum
        overflows float32 count as bad, too.
        """
        states = None if frozen_states is None else frozen_states.detach().sum(dtype=torch.float32) * 0
        if begins_step:
            self._parts = []
        self._parts.append(_Marks(keys, loss.detach().float() * 0, states))

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
        frozen = list(chain.from_iterable(gathered(_names(broken, name))))
        if frozen:
            raise NonFinite("hidden states", self.frozen, None).of(frozen)
        samples = chain.from_iterable(gathered(_names(bad, name)))
        self.samples = list(dict.fromkeys([*self.samples, *samples]))
        self.count += 1
        if self.count > self.limit:
            more = f" and {len(self.samples) - NAMED} more" if len(self.samples) > NAMED else ""
            found = f"not finite in {self.count} steps, with samples {', '.join(self.samples[:NAMED])}{more}"
            remedy = "Look at these samples, lower --lr, or raise --max-bad-steps."
            raise InputError("loss or gradient", found, f"{self.limit} such steps at most", remedy)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "samples": list(self.samples)}

    def load(self, state: dict[str, Any]) -> None:
        self.count, self.samples = state["count"], list(state["samples"])


def _names(parts: Sequence[_Marks], name: Callable[[int], str]) -> list[str]:
    """Return the ids of the samples of micro-batches, without fillers."""
    return [name(key.index) for part in parts for key in part.keys if not key.filler]
