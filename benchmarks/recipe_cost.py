"""What a step of each recipe costs (recipes.py), on one thread and this process's own clock, and so how many of them a
budget of CPU seconds buys."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from draftsmith.data.store.reading import read_object
from draftsmith.eval.clock import Clock, medians
from draftsmith.launch.commands import configure
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.types import InputError
from draftsmith.train.data_module import SampleKey
from draftsmith.train.prepare import prepare

PHASES = {"early": 0, "late": 1}  # before and after a training takes up its further passes
TOTAL = 1000  # steps of the training that a measured one says it is of


@dataclass(frozen=True)
class StepCost:
    """CPU seconds of a step before and after `after`, the share of the steps that have one pass only."""

    early: float
    late: float
    after: float

    def steps(self, seconds: float) -> int:
        """Steps that take so many seconds, at least one."""
        return max(1, round(seconds / (self.after * self.early + (1 - self.after) * self.late)))


class MeasuredTraining:
    """One training of `draftsmith train KIND`, of which any step can be taken."""

    def __init__(self, kind: str, words: Sequence[str]):
        _, config = configure(f"train {kind}", words)
        assert config is not None  # only of a command whose words ask for help
        self.config: Any = config
        training = prepare(config)
        self.module, self.data = training.module, training.data
        # At the first step of a warm-up: however often it is repeated, the weights stay where they are.
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        self.after: float = getattr(config, "passes_after", 0.0) or getattr(config, "unroll_after", 0.0)

    def step(self, share: float, phase: str) -> None:
        """Read, forward, backward, clip and update."""
        order, module = self.data.order, self.module
        epoch, chosen = order.step(int(share * order.steps_per_epoch))
        batch = self.data.train[tuple(SampleKey(epoch, i) for i in chosen)]
        inputs, _ = module.read(batch)
        now = TrainStep(PHASES[phase] * (TOTAL - 1), TOTAL, batch.lengths, list(range(len(chosen))), module.feature_std)
        module.loss(inputs, now).loss.backward()
        params = [p for p in module.head.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        torch.nn.utils.clip_grads_with_norm_(params, self.config.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Steps(Protocol):
    """A training whose steps can be taken one by one. after: as of `StepCost`."""

    after: float

    def step(self, share: float, phase: str) -> None:
        """Take the batch at this share of an epoch, as a step of this phase."""


def measured_costs(
    trainings: Mapping[str, Steps], batches: int, rounds: int, clock: Clock = time.process_time
) -> dict[str, StepCost]:
    """Name -> cost of its steps: of each of `batches` batches, spread over an epoch, the median of `rounds`; the mean
    over them. All trainings take their turn at a batch before the next one: a machine that slows down favours none."""
    sums = dict.fromkeys(((name, phase) for name in trainings for phase in PHASES), 0.0)
    for number in range(batches):
        share = number / batches
        calls = {f"{name} {phase}": functools.partial(trainings[name].step, share, phase) for name, phase in sums}
        taken = medians(calls, rounds, clock)
        for name, phase in sums:
            sums[name, phase] += taken[f"{name} {phase}"] / batches
    return {name: StepCost(sums[name, "early"], sums[name, "late"], own.after) for name, own in trainings.items()}


def read_costs(path: Path, names: Sequence[str]) -> dict[str, StepCost]:
    """The costs of an earlier calibration.

    Raises:
        InputError: it is damaged, or has none of a recipe that is asked for.
    """
    one = {"early": float, "late": float, "after": float}
    costs = read_object(path, {"costs": dict}, "Delete it, and they are measured again.")["costs"]
    if missing := [name for name in names if not one.keys() <= costs.get(name, {}).keys()]:
        found = f"{path} without {', '.join(missing)}"
        raise InputError("steps_of", found, "the cost of every recipe", "Measure anew, into another output.")
    return {name: StepCost(**costs[name]) for name in names}
