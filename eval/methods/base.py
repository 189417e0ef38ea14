"""What every decoding method has: settings, the models it needs, and a drafter built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class Models:
    """What the methods of one run may use; None where the user named no such model.

    paths: flag (`target`, `draft`, ...) -> what the user passed, for methods that load models in their own way.
    capacity: most tokens that a sequence of this run can hold, drafts included.
    measured: seconds that were measured of these models in this run, by name, so that it is done once
        (`eval.cost.tree_times`).
    step_costs: c by what drafts (`eval.cost.step_cost`). Both are JSON values, and kept with the run's results
        (`eval.bench.auto`).
    ends: tokens that end an answer: drafts of chains end there too.
    """

    target: CausalLM
    draft: CausalLM | None = None
    mid: CausalLM | None = None
    eagle: nn.Module | None = None
    acceptance: nn.Module | None = None
    paths: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    capacity: int = 0
    measured: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    step_costs: dict[str, float] = dataclasses.field(default_factory=dict)
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Method:
    """A way to decode.

    uses: flags of the models that it needs whatever its settings.
    eagle_for: flag of the model whose features its EAGLE head reads, where it uses one.
    judged: what its acceptance head has to judge, where it uses one.
    batchable: several prompts can be decoded together.
    """

    batchable: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ()
    eagle_for: ClassVar[str] = "target"
    judged: ClassVar[Literal["chain", "tree"]] = "chain"

    @property
    def needs(self) -> tuple[str, ...]:
        """Flags of the models it cannot do without."""
        return self.uses

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        """The drafter for this engine's own loop, for at most so many rows; None decodes without one."""
        raise TypeError(f"{type(self).__name__} is run by transformers and has no drafter")


@dataclass(frozen=True)
class Named:
    """A method and its name in tables, as the user wrote it."""

    label: str
    method: Method


def check_rows(flag: str, lm: CausalLM | None) -> None:
    """Raises:
    InputError: the model cannot read rows side by side, as it is run by transformers.
    """
    if lm is not None and not isinstance(lm, LlamaLM):
        found = "a model that only transformers can run"
        raise InputError(flag, found, "a Llama-family model, to decode in batches", "Pass --batch-size 1.")


def at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise InputError(name, value, f"{smallest} or more", "Raise it.")


def at_most(name: str, value: int, largest: int) -> None:
    if value > largest:
        raise InputError(name, value, f"{largest} or less", "Lower it.")


def between(name: str, value: float, low: float, high: float) -> None:
    """`value` lies strictly between."""
    if not low < value < high:
        raise InputError(name, value, f"a number between {low} and {high}", "Correct it.")
