"""What the formats of acceptance heads do alike: they read a draft's hidden states, in float32, and say P(accept)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.formats.base import (
    Finding,
    HeadFormat,
    Measure,
    Package,
    Parsed,
    Reading,
    TargetFacts,
    Trial,
    largest,
)
from draftsmith.modules.types import InputError

# Two float32 implementations of a few layers.
LARGEST_DIFFERENCE = 1e-4


class PredictorFormat(HeadFormat):
    """A directory that holds an acceptance head.

    tolerated: words of those errors of a reading that do not keep a head from being imported. assumed: notes on what
    an import takes for granted.
    """

    kind = "acceptance"
    predicts = True
    float32 = True
    num_drafted = 20
    tolerated: ClassVar[str | None] = None
    assumed: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def ours(self, reading: Reading) -> tuple[AcceptanceHeadConfig, dict[str, Tensor]]:
        """What the system computes with, as config and parameters of our head."""

    @abstractmethod
    def own_prob(self, head: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """P(accept) [N] as this format holds it, by our head. inputs: as of `Trial`."""

    def accept_prob(self, reading: Reading, inputs: Mapping[str, Tensor]) -> Tensor:
        """P(accept) [N] of what the system read; NaN where a weight is."""
        config, state = self.ours(reading)
        head = AcceptanceHead(config).requires_grad_(False)
        head.load_state_dict(state, strict=False)  # of tied blocks one has the name
        return self.own_prob(head, inputs)

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """A head that the system reads whole."""
        reading, notes = self.read(package, target), list[str]()
        for finding in reading.errors:
            found = f"{finding.where}: {finding.text}"
            if self.tolerated is None or self.tolerated not in finding.text:
                expected = f"a whole head of the format {self.name}"
                raise InputError("head", found, expected, "Check where it comes from, or export it again.")
            notes.append(found)
        return Parsed(*self.ours(reading), (*notes, *self.assumed))

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
