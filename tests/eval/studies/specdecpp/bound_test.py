"""SpecDec++'s theorem 3.1 against optimal stopping, worked out by dynamic programming over every policy of a small
Markov decision process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from draftsmith.eval.studies.specdecpp.sweep import rejection_bound

WANTED = 9


class Process:
    """An answer of WANTED tokens behind the first. A round drafts n tokens, which takes t_draft n + t_target, and gives
    those before the first rejected one and one of the target's own. chances: by place, that a drafted token there is
    accepted where all before it in the draft were. length: of every draft, where the answer has room for it; None
    drafts as is best."""

    def __init__(self, chances: Sequence[float], t_draft: float, length: int | None = None, t_target: float = 1.0):
        self.chances, self.t_draft, self.length, self.t_target = chances, t_draft, length, t_target
        self.value = cache(self._value)

    def cost(self, start: int, count: int) -> float:
        """Of the rest of the answer, with `count` tokens drafted behind `start` others."""
        cost, alive = self.t_draft * count + self.t_target, 1.0
        for place, chance in enumerate(self.chances[start : start + count], start=start):
            cost += alive * (1 - chance) * self.value(place + 1)
            alive *= chance
        return cost + alive * self.value(start + count + 1)

    def _value(self, start: int) -> float:
        """Expected cost of the rest of the answer behind `start` tokens: by the policy, or the least."""
        most = WANTED - start - 1
        if most < 0:
            return 0.0
        return min(self.cost(start, n) for n in ([min(self.length, most)] if self.length else range(most + 1)))

    def rejected(self, start: int, count: int) -> float:
        return 1 - math.prod(self.chances[start : start + count])

    @property
    def states(self) -> list[tuple[int, int]]:
        """(tokens before the round, drafted so far), those where one more may be drafted."""
        return [(start, n) for start in range(WANTED) for n in range(1, WANTED - start - 1)]

    def longer(self, start: int, count: int) -> list[int]:
        """Drafts that go on: every one there is, or the policy's."""
        lengths = range(count + 1, WANTED - start)
        return [n for n in lengths if n == min(self.length, lengths[-1])] if self.length else list(lengths)

    def better_goes_on(self, start: int, count: int) -> bool:
        """Costs that differ in the last bits are the same."""
        costs = [self.cost(start, n) for n in self.longer(start, count)]
        return min(costs, default=math.inf) < self.cost(start, count) - 1e-12

    @property
    def delta(self) -> float:
        """How much more than c2 a token going on may save, where nothing drafted so far is rejected."""
        found = [0.0]
        for start, count in self.states:
            sure = Process([*self.chances[:start], *[1.0] * count, *self.chances[start + count :]], self.t_draft)
            sure.value = self.value
            for n in self.longer(start, count):
                saved = sure.cost(start, count) - sure.cost(start, n)
                found.append(saved - (n - count) * (self.t_target - self.t_draft))
        return max(found)


def chances_of(seed: int) -> list[float]:
    return np.random.default_rng(seed).beta(2, 0.7, WANTED).tolist()


@pytest.mark.parametrize("t_draft", [0.05, 0.2, 0.6])
def test_the_optimal_policy_never_drafts_on_past_the_bound(t_draft):
    bound, looked_at = rejection_bound(t_draft, 1.0), 0
    assert bound == pytest.approx(1 - t_draft)
    for seed in range(20):
        process = Process(chances_of(seed), t_draft)
        assert process.delta == pytest.approx(0, abs=1e-12)
        past = [state for state in process.states if process.rejected(*state) >= bound]
        assert not any(process.better_goes_on(*state) for state in past)
        looked_at += len(past)
    assert looked_at > 10


@pytest.mark.parametrize("t_draft", [0.1, 0.4])
def test_the_bound_is_tight_where_one_more_token_saves_a_call(t_draft):
    """A doubtful token, then a certain one, which ends the answer: stopping before it costs one more call."""
    start, bound = WANTED - 3, rejection_bound(t_draft, 1.0)

    def goes_on(chance: float) -> bool:
        return Process([0.5] * start + [chance, 1.0, 1.0], t_draft).better_goes_on(start, 1)

    assert goes_on(1 - bound + 1e-6) and not goes_on(1 - bound - 1e-6)


def test_a_policy_that_drafts_badly_afterwards_needs_delta():
    """Long drafts that are seldom accepted make the next round dear, and an early stop brings it sooner."""
    without = with_delta = 0
    for seed in range(20):
        for length in (2, 4, 6):
            process = Process(chances_of(seed), 0.4, length)
            bounds = rejection_bound(0.4, 1.0), rejection_bound(0.4, 1.0, process.delta)
            for state in process.states:
                goes_on, rejected = process.better_goes_on(*state), process.rejected(*state)
                without += goes_on and rejected >= bounds[0]
                with_delta += goes_on and rejected >= bounds[1]
    assert without > 0 and with_delta == 0
