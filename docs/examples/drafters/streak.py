"""A way to stop drafting in one file: `streak:low=2` drafts on while everything is accepted, and little after a miss.

Any file of this folder whose METHODS lists a method is known wherever methods are: `eval bench`, `decode`, Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.modules.decoding.stop import DraftView, StopPolicy
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import ChainMethod


class Streak(StopPolicy):
    """One token more after a round that was accepted whole, half of it after one that was not."""

    def __init__(self, low: int, high: int):
        self.low, self.max_drafted, self._length = low, high, low

    def reset(self) -> None:
        self._length = self.low

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self._length

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        whole = num_accepted == num_drafted
        self._length = min(self.max_drafted, self._length + 1) if whole else max(self.low, self._length // 2)


@dataclass(frozen=True)
class StreakRule(ChainMethod):
    """Between low and high drafted tokens, by how the last rounds went."""

    low: int = 2
    high: int = 12

    def policy(self, models: Models) -> StopPolicy:
        return Streak(self.low, self.high)


METHODS = {"streak": StreakRule()}
