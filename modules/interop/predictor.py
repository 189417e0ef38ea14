"""What the formats of acceptance heads do alike: they read a draft's hidden states, in float32, and say P(accept)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from draftsmith.modules.interop.base import Finding, HeadFormat, Measure, Package, Reading, Trial, largest

# Two float32 implementations of a few layers.
LARGEST_DIFFERENCE = 1e-4


class PredictorFormat(HeadFormat):
    """A directory that holds an acceptance head."""

    kind = "acceptance"
    predicts = True
    float32 = True
    num_drafted = 20

    @abstractmethod
    def accept_prob(self, reading: Reading, inputs: Mapping[str, Tensor]) -> Tensor:
        """P(accept) [N] by the system's rules. inputs: as of `Trial`."""

    @abstractmethod
    def own_prob(self, head: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N]: what our head says in its place."""

    def compare(self, reading: Reading, head: Any, package: Package, trial: Trial) -> list[Measure]:
        ours = self.own_prob(head, trial.inputs)
        value, low, high = largest(self.accept_prob(reading, trial.inputs) - ours), float(ours.min()), float(ours.max())
        name, bar = f"P(accept) of {ours.numel()} states", f"at most {LARGEST_DIFFERENCE:g}"
        return [
            Measure(name, f"differs by {value:.1e}", bar, value <= LARGEST_DIFFERENCE),
            Measure("its opinions", f"P from {low:.3f} to {high:.3f}", "not all the same", high > low),
        ]


def unreadable(package: Package, refused: Sequence[Finding], why: str) -> Reading:
    """The reading of a directory whose config stops the system."""
    unread = [Finding("error", name, f"not read: {why}") for name in package.tensors]
    return Reading({}, {}, (*refused, *unread), ())
