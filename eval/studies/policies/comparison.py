"""The comparison itself: every family's setting chosen on dev prompts, and what it gains on the reported ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.studies.policies.families import FIXED, Policy, PolicyFamily, PolicyGrid, Role
from draftsmith.eval.studies.policies.replayed import Gain, PolicyReplay, gain, predictors_of, rate
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.trace import Totals, pool
from draftsmith.modules.types import SamplingParams

NAMES = {"draft": "draft model", "eagle": "EAGLE chain"}
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class DrafterMode:
    """One drafter at one temperature, with the heads whose labels are of that mode; rounds of dev and reported
    prompts."""

    drafter: str
    params: SamplingParams
    heads: Mapping[str, AcceptanceHead]
    dev: ChainRollouts
    test: ChainRollouts

    @property
    def mode(self) -> str:
        return "greedy" if self.params.greedy else f"T={self.params.temperature:g}"

    @property
    def title(self) -> str:
        return f"{NAMES[self.drafter]}, {self.mode}"


@dataclass(frozen=True)
class Chosen:
    """A family's setting, and its gain over the best fixed K on the prompts that it was chosen on."""

    family: PolicyFamily
    policy: Policy
    dev_gain: float


@dataclass(frozen=True)
class AtCost:
    """Settings chosen at one c, by family. own: c is this machine's."""

    c: float
    own: bool
    chosen: Mapping[str, Chosen]

    def best(self, role: Role) -> Chosen | None:
        """The best of a role's families on dev prompts."""
        return max(self.of(role), key=lambda item: item.dev_gain, default=None)

    def of(self, role: Role) -> list[Chosen]:
        return [item for item in self.chosen.values() if item.family.role == role]

    @property
    def fixed(self) -> Chosen:
        return self.chosen[FIXED]

    @property
    def name(self) -> str:
        """Name of this c in tables."""
        return f"{self.c:.3g}{' (here)' if self.own else ''}"


@dataclass(frozen=True)
class PolicyComparison:
    """Settings chosen for one drafter and mode at every c, this machine's last. test: replays the reported prompts.
    overlaps, least: of the reported prompts, the share of their answers' n-grams that heads were trained on, and
    whether it is among the least third."""

    scene: DrafterMode
    at: Sequence[AtCost]
    test: PolicyReplay
    overlaps: Sequence[float]
    least: Mask
    seed: int

    @property
    def own(self) -> AtCost:
        """The comparison at this machine's c."""
        return self.at[-1]

    @cached_property
    def tasks(self) -> NDArray[np.str_]:
        """Tasks of the reported prompts."""
        return np.array([answer.task for answer in self.scene.test.answers], np.str_)

    def gain(self, at: AtCost, own: Chosen, base: Chosen | None = None, mask: Mask | None = None) -> Gain:
        """Over the best fixed K, or another; of the prompts in the mask."""
        pairs, others = (self.test.pairs(chosen.policy, at.c) for chosen in (own, base or at.fixed))
        return gain(pairs, others, self.seed, mask)

    def totals(self, at: AtCost, own: Chosen, first: int | None = None) -> Totals:
        """Counts over the reported prompts, or over the first so many."""
        return pool(self.test.traces(own.policy, at.c)[:first])


def compare_policies(
    scene: DrafterMode, grid: PolicyGrid, cs: Sequence[float], overlaps: Sequence[float], least: Mask, seed: int
) -> PolicyComparison:
    """cs: the last one is this machine's own."""
    families = grid.families(scene.heads, scene.dev.accept_along is not None)
    dev = PolicyReplay(scene.dev, predictors_of(scene.dev, scene.dev, scene.heads))
    test = PolicyReplay(scene.test, predictors_of(scene.test, scene.dev, scene.heads))
    at = [choose_settings(dev, families, c, number == len(cs) - 1) for number, c in enumerate(cs)]
    return PolicyComparison(scene, at, test, overlaps, least, seed)


def choose_settings(dev: PolicyReplay, families: Sequence[PolicyFamily], c: float, own: bool) -> AtCost:
    best = {family.name: dev.best(family.policies, c) for family in families}
    base = rate(dev.pairs(best[FIXED], c))
    chosen = {
        family.name: Chosen(family, best[family.name], rate(dev.pairs(best[family.name], c)) / base - 1)
        for family in families
    }
    return AtCost(c, own, chosen)
