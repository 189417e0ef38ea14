"""How far a draft tree is to grow, and how many of its nodes the target is to score: as is worth the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.modules.acceptance.policies import RecentRatio


@dataclass(frozen=True)
class TreeTimes:
    """What the parts of a round take, in one unit, whichever.

    first, step: the drafter's first level, which reads what was emitted, and every further one. verify: by the number
    of nodes, from 0 on: the target's call for them and the root, and what else a round takes.
    """

    first: float
    step: float
    verify: tuple[float, ...]

    def draft(self, calls: int) -> float:
        """Time of so many forwards of the drafter."""
        return self.first + (calls - 1) * self.step


class TreeRule:
    """The number of nodes that is worth most at the pace so far, and the depth.

    A tree of the n candidates of highest value is expected to give 1 + sum of P_i tokens, P_i the probability that
    node i's whole path is accepted, and takes the time of drafting it and verify[n]. The n that maximises tokens -
    pace x time maximises tokens by time in the long run, when `pace` is that maximum (Dinkelbach 1967; see
    `policies.CostRule`). Drafting is paid for when n is chosen, so it counts in the pace only.

    Another level is worth its time where the nodes to be expanded, one of which is on the target's path with the sum of
    their P_i, would bring more tokens than the pace does: that sum x the share of accepted levels among the verified.

    Values may be too sure of themselves, all the more where the best of many are taken: every P_i is multiplied by
    `trust`, the nodes accepted so far by those that were expected.
    """

    def __init__(self, times: TreeTimes, any_depth: bool = False):
        """any_depth: drafting may end before the tree's depth."""
        self.times, self._any_depth = times, any_depth
        # As if one round had been: a tree of one node, accepted half of the time; and three nodes accepted as promised.
        self._pace = RecentRatio(1.5, times.draft(1) + times.verify[1])
        self._acceptance, self._trust = RecentRatio(0.5, 1.0), RecentRatio(3.0, 3.0)
        self.learners = (self._pace, self._acceptance, self._trust)
        self._expected = 0.0  # of the nodes chosen last, as their values say

    @property
    def pace(self) -> float:
        """Tokens by time, so far."""
        return self._pace.value

    @property
    def trust(self) -> float:
        """Accepted nodes by those that their values promised, so far."""
        return self._trust.value

    def deeper(self, frontier: Callable[[], Sequence[float]]) -> bool:
        """Whether to draft one more level. frontier: logarithms of P_i of the nodes that would be expanded."""
        if not self._any_depth:
            return True
        survival = self.trust * sum(map(math.exp, frontier()))
        return survival * self._acceptance.value > self.pace * self.times.step

    def choose(self, values: Sequence[float]) -> int:
        """How many of the candidates to take, 1 or more. values: logarithms of P_i, best first."""
        pace, trust, verify = self.pace, self.trust, self.times.verify
        expected, best, most = 0.0, 1, -math.inf
        for count, value in enumerate(values[: len(verify) - 1], start=1):
            expected += math.exp(value)
            worth = trust * expected - pace * verify[count]
            if worth > most:
                best, most, self._expected = count, worth, expected
        return best

    def observe(self, num_nodes: int, draft_calls: int, num_accepted: int) -> None:
        """The verdict on the tree that was chosen last."""
        self._pace.add(num_accepted + 1, self.times.draft(draft_calls) + self.times.verify[num_nodes])
        self._acceptance.add(num_accepted, min(num_accepted + 1, draft_calls))
        self._trust.add(num_accepted, self._expected)
