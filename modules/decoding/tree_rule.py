"""Choose the depth of a draft tree and the number of nodes to verify, by tokens per time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.modules.decoding.stop import RecentRatio


@dataclass(frozen=True)
class TreeTimes:
    """Times of a round's parts, in any one unit.

    first, step: the drafter's first level, which reads the emitted tokens, and every further one. verify: by number of
    nodes, from 0: the target's call for them and the root, and the rest of the round.
    """

    first: float
    step: float
    verify: tuple[float, ...]

    def draft(self, calls: int) -> float:
        """Return the time of so many forwards of the drafter."""
        return self.first + (calls - 1) * self.step


class TreeRule:
    """Rule that maximizes tokens per time over the depth and the number of nodes.

    A tree of the n best candidates is expected to yield 1 + sum of P_i tokens, P_i the probability that node i's whole
    path is accepted, and takes its drafting time and verify[n]. The n that maximizes tokens - pace x time maximizes
    tokens per time in the long run if `pace` is that maximum (Dinkelbach 1967; see `stop.CostRule`). Drafting is
    paid for by the time n is chosen, so it counts in the pace only.

    Another level pays if it is expected to bring more tokens than the pace does in its time: the sum of the P_i of the
    nodes to be expanded (the probability that the target's path goes through one of them) x the share of accepted
    levels among the verified.

    Values may be overconfident, the more so as the best of many are taken: every P_i is multiplied by `trust`, the
    accepted nodes so far over the expected ones.
    """

    def __init__(self, times: TreeTimes, any_depth: bool = False):
        """any_depth: drafting may end before the tree's depth."""
        self.times, self._any_depth = times, any_depth
        # Start as after one round: a tree of one node, accepted half of the time; and three nodes accepted as expected.
        self._pace = RecentRatio(1.5, times.draft(1) + times.verify[1])
        self._acceptance, self._trust = RecentRatio(0.5, 1.0), RecentRatio(3.0, 3.0)
        self.learners = (self._pace, self._acceptance, self._trust)
        # Accepted nodes among those chosen last.
        self._expected = 0.0

    @property
    def pace(self) -> float:
        """Tokens per time so far."""
        return self._pace.value

    @property
    def trust(self) -> float:
        """Accepted nodes over expected nodes so far."""
        return self._trust.value

    def deeper(self, frontier: Callable[[], Sequence[float]]) -> bool:
        """Return whether to draft one more level. frontier: log P_i of the nodes that would be expanded."""
        if not self._any_depth:
            return True
        # The target's path goes through at most one of them.
        survival = self.trust * sum(map(math.exp, frontier()))
        return survival * self._acceptance.value > self.pace * self.times.step

    def choose(self, values: Sequence[float]) -> int:
        """Return how many candidates to verify, at least 1. values: log P_i, best first."""
        pace, trust, verify = self.pace, self.trust, self.times.verify
        # A tree has one node at least.
        expected, best, most = 0.0, 1, -math.inf
        for count, value in enumerate(values[: len(verify) - 1], start=1):
            expected += math.exp(value)
            worth = trust * expected - pace * verify[count]
            if worth > most:
                best, most, self._expected = count, worth, expected
        return best

    def observe(self, num_nodes: int, draft_calls: int, num_accepted: int) -> None:
        """Learn the verdict on the tree that was chosen last."""
        self._pace.add(num_accepted + 1, self.times.draft(draft_calls) + self.times.verify[num_nodes])
        # Levels behind the first rejected one were not verified.
        self._acceptance.add(num_accepted, min(num_accepted + 1, draft_calls))
        self._trust.add(num_accepted, self._expected)
