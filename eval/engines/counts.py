"""What an engine made of prompts, in the numbers that vLLM counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Of chains of one length.

    drafts: rounds with a draft. by_place: [K], drafts whose tokens were accepted at least up to there. What an end
    token or the limit cuts off is counted among the accepted, as vLLM does.
    """

    drafts: int
    by_place: tuple[int, ...]

    @staticmethod
    def of(accepted: Iterable[int], length: int) -> Counts:
        """accepted: tokens of each round."""
        rounds = list(accepted)
        return Counts(len(rounds), tuple(sum(count > place for count in rounds) for place in range(length)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.drafts + other.drafts, tuple(a + b for a, b in zip(self.by_place, other.by_place, strict=True))
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.drafts - other.drafts, tuple(a - b for a, b in zip(self.by_place, other.by_place, strict=True))
        )

    @property
    def accepted(self) -> int:
        return sum(self.by_place)

    @property
    def length(self) -> float:
        """Tokens a round: the accepted ones and the target's own."""
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def shares(self) -> tuple[float, ...]:
        """[K]: how many of the drafts were accepted up to each place."""
        return tuple(count / max(self.drafts, 1) for count in self.by_place)


@dataclass(frozen=True)
class Answer:
    """A greedy answer and what its rounds counted."""

    tokens: tuple[int, ...]
    counts: Counts


def total(answers: Iterable[Answer]) -> Counts:
    first, *rest = (answer.counts for answer in answers)
    return sum(rest, first)
