"""Answers in rows: where they are, and how much a head can learn from them.

A row is one sequence with any number of answers; `loss_mask` [T] is true on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# An EAGLE head trained on fewer answer tokens drafts too badly to pay for its time. One trained on answers with a
# shorter median knows how answers begin, and little else (docs/data.md has the curve).
FEWEST_ANSWER_TOKENS = 60_000
SHORTEST_MEDIAN = 16


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
