"""Losses and gradients that are not finite: seen on any rank, the step is left out on all of them.

Where it is what a frozen model gave that is not finite, no step can mend it, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import InputError, LossOutput
from draftsmith.train.metrics import gathered, sum_over_ranks

# Samples that an error names.
NAMED = 20


@dataclass
class _PartMarks:
    """Numbers of its samples; a mark that is 0 where its loss and gradients are finite, else NaN; and such a mark of
    the states that a frozen model gave, if it did."""

    samples: list[int]
    mark: Tensor
    states: Tensor | None


class BadSteps:
    """Watches the parts of each step and counts the steps that were left out.

    limit: the run ends when more steps than this were bad. model: flag of the frozen model. count: bad steps so far, in
    this run and those it continues. samples: names of what was in their bad parts, on all ranks, in order of first
    appearance.
    """

    def __init__(self, limit: int, model: str = "target"):
        self.limit, self.model, self.count = limit, model, 0
        self.samples: list[str] = []
        self._parts: list[_PartMarks] = []
        self._states: Tensor | None = None

    def watch(self, module: nn.Module) -> None:
        """Look at every gradient as this rank computes it, before it is summed with other ranks' and other parts'."""
        for param in module.parameters():
            if param.requires_grad:
                param.register_hook(self._see)

    def begin(self) -> None:
        """A step begins."""
        self._parts = []

    def given(self, states: Tensor) -> None:
        """Hidden states of the frozen model, of the part whose loss is added next."""
        self._states = states.detach().sum(dtype=torch.float32) * 0

    def add(self, loss: Tensor, samples: list[int]) -> None:
        """A part's loss, and the numbers of its samples; its gradients follow."""
        # 0 where everything is finite, else NaN: one number on the device, which nothing waits for. (A sum of finite
        # gradients that overflows float32 counts as bad, too.)
        self._parts.append(_PartMarks(samples, loss.detach().float() * 0, self._states))
        self._states = None

    def _see(self, gradient: Tensor) -> None:
        if self._parts:
            part = self._parts[-1]
            part.mark = part.mark + gradient.sum().float() * 0

    def agree(self, norm: Tensor | None, name: Callable[[int], str]) -> tuple[bool, float]:
        """Whether any rank saw a bad part, and the norm as a number. All ranks call it and get the same answer.

        norm: of the step's whole gradient, where it is known by now; it is the same on every rank. name: what users
            know a sample by.

        Raises:
            InputError: too many steps were bad.
            NonFinite: what a frozen model gave was not finite.
        """
        marks = torch.stack([part.mark for part in self._parts])
        bad = sum_over_ranks(marks.isnan().any().double())
        known = torch.zeros_like(bad) if norm is None else norm.double()
        number, size = torch.stack([bad, known.to(bad.device)]).tolist()  # the one wait for the device
        if not number and size - size == 0:
            return False, size
        self.add_step(name, everything=not number)
        return True, size

    def add_step(self, name: Callable[[int], str], everything: bool) -> None:
        """Count the running step as bad. everything: no single part was bad, but their sum is."""
        bad = [part for part in self._parts if everything or bool(part.mark.isnan())]
        broken = [part for part in bad if part.states is not None and bool(part.states.isnan())]
        frozen = list(chain.from_iterable(gathered([name(i) for part in broken for i in part.samples])))
        if frozen:
            raise NonFinite("hidden states", self.model, None).of(frozen)
        samples = chain.from_iterable(gathered([name(i) for part in bad for i in part.samples]))
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


def finite(output: LossOutput) -> LossOutput:
    """The output with nothing in its sums and counts where the loss is not finite: it would make every mean so."""
    keep = output.loss.detach().isfinite()

    def kept(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.where(keep.to(value.device), value, 0) for name, value in values.items()}

    return LossOutput(output.loss, kept(output.sums), kept(output.counts))
