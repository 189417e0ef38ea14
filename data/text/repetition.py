"""Share of answer tokens that continue a repetition.

Text that copies its prompt or itself is easier to draft than other text, so acceptance rates hold for one such share.
A token continues a repetition if it and the three tokens before it occurred in its sequence before, in this order. It
copies what they first occurred in: the prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Shorter grams repeat often in text that copies nothing.
SIZE = 4
NEW, FROM_PROMPT, FROM_ANSWER = range(3)


def origins(ids: Sequence[int], mask: Sequence[bool], size: int = SIZE) -> list[int]:
    """Return FROM_PROMPT, FROM_ANSWER or NEW for each token [T].

    It says where the `size` tokens that end with it first ended, NEW if here. Occurrences may overlap. The first
    size - 1 tokens are NEW. mask [T]: true on answers.
    """
    first: dict[tuple[int, ...], int] = {}
    result = [NEW] * len(ids)
    for at in range(size - 1, len(ids)):
        # The first occurrence decides, so later ones do not replace it.
        gram = tuple(ids[at - size + 1 : at + 1])
        result[at] = first.get(gram, NEW)
        first.setdefault(gram, FROM_ANSWER if mask[at] else FROM_PROMPT)
    return result


def distinct_4grams(answers: Iterable[Sequence[int]]) -> float | None:
    """Return distinct 4-grams by all 4-grams, counted per answer; None without a 4-gram.

    It is low for looping text, which flatters every drafter.
    """
    grams = [list(zip(*(ids[i:] for i in range(4)), strict=False)) for ids in answers]
    total = sum(map(len, grams))
    return sum(len(set(answer_grams)) for answer_grams in grams) / total if total else None


@dataclass(frozen=True)
class Repetition:
    """Shares of answer tokens that continue a repetition of the prompt, or of an answer of the same sequence."""

    from_prompt: float
    from_answer: float

    @classmethod
    def of(cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Repetition:
        """Count in sequences, each given as ids [T] and answer mask [T]."""
        counts = [0, 0, 0]
        for ids, mask in sequences:
            for origin, answered in zip(origins(ids, mask), mask, strict=True):
                counts[origin] += bool(answered)
        total = max(1, sum(counts))
        return cls(counts[FROM_PROMPT] / total, counts[FROM_ANSWER] / total)

    def text(self) -> str:
        where = f"{self.from_prompt:.0%} of the prompt, {self.from_answer:.0%} of an answer"
        return f"{self.from_prompt + self.from_answer:.0%} go on with a repetition: {where}"
