"""How many nodes of a draft tree the target is to score: as many as are worth their time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.modules.decoding.policies import RecentRatio


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
        """Of so many forwards of the drafter."""
        return self.first + (calls - 1) * self.step


class NodeRule:
    """The number of nodes that is worth most at the pace so far.

    A tree of the n candidates of highest value is expected to give 1 + sum of P_i tokens, P_i the probability that
    node i's whole path is accepted, and takes the time of drafting it and verify[n]. The n that maximises tokens -
    pace x time maximises tokens by time in the long run, when `pace` is that maximum (Dinkelbach 1967; see
    `policies.CostRule`). Drafting is paid for when n is chosen, so it counts in the pace only.
    """

    def __init__(self, times: TreeTimes):
        self._times = times
        # As if one round had been: a tree of one node, accepted half of the time.
        self._pace = RecentRatio(1.5, times.draft(1) + times.verify[1])

    @property
    def pace(self) -> float:
        """Tokens by time, so far."""
        return self._pace.value

    def choose(self, values: Sequence[float]) -> int:
        """How many of the candidates to take, 1 or more. values: logarithms of P_i, best first."""
        pace, verify = self.pace, self._times.verify
        tokens, best, most = 0.0, 1, -math.inf
        for count, value in enumerate(values[: len(verify) - 1], start=1):
            tokens += math.exp(value)
            worth = tokens - pace * verify[count]
            if worth > most:
                best, most = count, worth
        return best

    def observe(self, num_nodes: int, draft_calls: int, num_accepted: int) -> None:
        """The verdict on a round's tree."""
        self._pace.add(num_accepted + 1, self._times.draft(draft_calls) + self._times.verify[num_nodes])
