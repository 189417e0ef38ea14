"""Which tokens go on with a repetition. Text that copies, its prompt or itself, is easier to draft than text that does
not: what a table says of drafters holds for its share of it.

A token goes on with a repetition where it and the three before it have stood in its sequence before, one behind the
other. Whether they stood in the prompt or in an answer the first time says which of them it copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIZE = 4  # tokens: of fewer, many stand in a text twice that copies nothing
NEW, FROM_PROMPT, FROM_ANSWER = range(3)


def origins(ids: Sequence[int], mask: Sequence[bool], size: int = SIZE) -> list[int]:
    """Of each token [T]: FROM_PROMPT or FROM_ANSWER, by where the `size` tokens that end with it ended first, and NEW
    where that is here; they may overlap. mask [T]: what is answer. The first size - 1 tokens are NEW."""
    first: dict[tuple[int, ...], int] = {}
    found = [NEW] * len(ids)
    for at in range(size - 1, len(ids)):
        gram = tuple(ids[at - size + 1 : at + 1])
        found[at] = first.get(gram, NEW)
        first.setdefault(gram, FROM_ANSWER if mask[at] else FROM_PROMPT)
    return found


def distinct_4grams(answers: Iterable[Sequence[int]]) -> float | None:
    """Distinct 4-grams by all 4-grams, each answer for itself: looping text, which flatters every drafter, is low. None
    without a 4-gram."""
    grams = [list(zip(*(ids[i:] for i in range(4)), strict=False)) for ids in answers]
    total = sum(len(own) for own in grams)
    return sum(len(set(own)) for own in grams) / total if total else None


@dataclass(frozen=True)
class Repetition:
    """Shares of answer tokens that go on with a repetition of the prompt, and of an answer (this one or an earlier
    one of the sequence)."""

    from_prompt: float
    from_answer: float

    @classmethod
    def of(cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Repetition:
        """sequences: ids [T] of each, and its mask [T] of what is answer."""
        counts = [0, 0, 0]
        for ids, mask in sequences:
            for origin, answered in zip(origins(ids, mask), mask, strict=True):
                counts[origin] += bool(answered)
        total = max(1, sum(counts))
        return cls(counts[FROM_PROMPT] / total, counts[FROM_ANSWER] / total)

    def text(self) -> str:
        """The shares in words."""
        where = f"{self.from_prompt:.0%} of the prompt, {self.from_answer:.0%} of an answer"
        return f"{self.from_prompt + self.from_answer:.0%} go on with a repetition: {where}"
