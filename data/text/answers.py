"""Which tokens of a row are answers, and what they come to: what a head can learn of an artefact.

A row is one sequence with any number of answers in it: `loss_mask` [T] is true on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# An EAGLE head that learned from fewer answer tokens drafts too badly to be worth its time; one that learned from
# answers with a shorter median knows how answers begin, and little else (docs/training.md has the curve).
FEWEST_ANSWER_TOKENS = 60_000
SHORTEST_MEDIAN = 16
# Positions that count as the beginning of an answer.
EARLY = 5


def spans(mask: Sequence[bool] | np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each answer, in order: between two answers there is always what the user says."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, dtype=np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def answers_of(row: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of each answer of a row."""
    return [row["input_ids"][start:end] for start, end in spans(row["loss_mask"])]


@dataclass(frozen=True)
class Supervision:
    """What will be learned.

    answers, answer_tokens: how many. tokens_p5, tokens_p50, tokens_p95: of the answers, how many tokens one has.
    early_share: of the answer tokens, those among the first EARLY of their answer.
    """

    answers: int
    answer_tokens: int
    tokens_p5: float
    tokens_p50: float
    tokens_p95: float
    early_share: float

    @classmethod
    def of(cls, lengths: np.ndarray) -> Supervision:
        """What answers of so many tokens each come to."""
        total = int(lengths.sum())
        low, middle, high = np.percentile(lengths, [5, 50, 95]).tolist() if len(lengths) else (0.0, 0.0, 0.0)
        early = int(np.minimum(lengths, EARLY).sum())
        return cls(len(lengths), total, low, middle, high, early / max(1, total))

    def numbers(self) -> dict[str, float]:
        """The fields as a manifest has them."""
        return {name: round(value, 4) for name, value in asdict(self).items()}

    def text(self) -> str:
        """One line for the user."""
        return (
            f"{self.answers:,} answers with {self.answer_tokens:,} tokens to learn from; tokens an answer: "
            f"{self.tokens_p5:,.0f} (p5), {self.tokens_p50:,.0f} (median), {self.tokens_p95:,.0f} (p95); "
            f"{self.early_share:.0%} of them are among the first {EARLY} of an answer"
        )

    def warning(self, tokens_needed: int = FEWEST_ANSWER_TOKENS) -> str | None:
        """What is too little or too short to learn from, in one line, if anything is. tokens_needed: fewest answer
        tokens, where the reader's job needs another number."""
        few = self.answer_tokens < tokens_needed
        short = self.tokens_p50 < SHORTEST_MEDIAN
        if not few and not short:
            return None
        found = [f"{self.answer_tokens:,} answer tokens (fewer than {tokens_needed:,})"] if few else []
        found += [f"a median answer of {self.tokens_p50:,.0f} tokens (fewer than {SHORTEST_MEDIAN})"] if short else []
        remedies = ["more prompts"] if few else []
        remedies += ["prompts with longer answers like those that will be served"] if short else []
        risk = "a head that learns from this may slow decoding down, whatever its own validation says"
        return f"warning: {' and '.join(found)}: {risk}. Use {', '.join(remedies)} (docs/training.md)."
