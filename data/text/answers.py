"""Answers in rows: where they are, how much a head can learn from them, and how much of them is repetition.

A row is one sequence with any number of answers; `loss_mask` [T] is true on each of them. Text that copies its prompt
or itself is easier to draft than other text, so acceptance rates hold for one such share. A token continues a
repetition if it and the three tokens before it occurred in its sequence before, in this order. It copies what they
first occurred in: the prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# An EAGLE head trained on fewer answer tokens drafts too badly to pay for its time. One trained on answers with a
# shorter median knows how answers begin, and little else (docs/data.md has the curve).
FEWEST_ANSWER_TOKENS = 60_000
SHORTEST_MEDIAN = 16
# Shorter grams repeat often in text that copies nothing.
SIZE = 4
NEW, FROM_PROMPT, FROM_ANSWER = range(3)


def spans(mask: Sequence[bool] | np.ndarray) -> list[tuple[int, int]]:
    """Return [start, end) of each answer, in order. Two answers are never adjacent: the user speaks between them."""
    # Edges of the mask alternate between begin and end.
    edges = np.flatnonzero(np.diff(np.asarray(mask, dtype=np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Supervision:
    """Size of a training set: how many answers, their tokens, and the median of tokens per answer."""

    answers: int
    answer_tokens: int
    tokens_p50: float

    @classmethod
    def of(cls, lengths: np.ndarray) -> Supervision:
        """Summarize answers of these lengths in tokens."""
        return cls(len(lengths), int(lengths.sum()), float(np.median(lengths)) if len(lengths) else 0.0)

    def text(self) -> str:
        return f"{self.answers:,} answers with {self.answer_tokens:,} tokens, a median of {self.tokens_p50:,.0f}"

    def warning(self, tokens_needed: int = FEWEST_ANSWER_TOKENS) -> str | None:
        """Return a warning if there is too little, or too short, to learn from; else None."""
        facts, remedies = [], []
        if self.answer_tokens < tokens_needed:
            facts.append(f"{self.answer_tokens:,} answer tokens (fewer than {tokens_needed:,})")
            remedies.append("more prompts")
        if self.tokens_p50 < SHORTEST_MEDIAN:
            facts.append(f"a median answer of {self.tokens_p50:,.0f} tokens (fewer than {SHORTEST_MEDIAN})")
            remedies.append("prompts with longer answers like those that will be served")
        if not facts:
            return None
        risk = "a head that learns from this may slow decoding down, whatever its own validation says"
        return f"warning: {' and '.join(facts)}: {risk}. Use {', '.join(remedies)} (docs/data.md)."


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
