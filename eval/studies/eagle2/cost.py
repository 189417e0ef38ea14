"""Seconds of tree decoding as a linear function of its counts, fitted to measured runs: what carries a measurement of a
few sizes over to all that were replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.replay.rollouts import Floats
from draftsmith.modules.decoding.trace import Totals

COUNTS = ("num_target_calls", "num_draft_tokens", "draft_calls")


@dataclass(frozen=True)
class Cost:
    """Seconds of one target call, of one drafted token (to score it, and to have chosen it) and of one forward of the
    head, for trees of one topk; once more `fixed` for what all runs over the same prompts share, prefills above all."""

    fixed: float
    weights: Floats

    def seconds(self, counts: Mapping[str, Any] | Totals) -> float:
        return float(self.fixed + self.weights @ _counts(counts))


def fit(rows: Sequence[Mapping[str, Any]]) -> Cost:
    """Least squares of relative errors over rows of one bench (the SpecDec++ regression, eq. 2.3, with trees' counts).

    rows: at least as many as there are unknowns, `ar` among them, whose drafts count 0.
    """
    taken = np.array([seconds_of(row) for row in rows])
    known = np.array([[1.0, *_counts(row)] for row in rows])
    assert len(rows) >= known.shape[1]
    found = np.linalg.lstsq(known / taken[:, None], np.ones(len(rows)), rcond=None)[0]
    return Cost(float(found[0]), found[1:])


def seconds_of(row: Mapping[str, Any]) -> float:
    """By the bench's clock."""
    return row["tokens"] / row["tokens_per_s"]


def left_out(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Seconds of every row as the others predict them; None where the others are too few to say."""
    if len(rows) - 1 < len(COUNTS) + 1:
        return [None] * len(rows)
    return [fit([other for other in rows if other is not row]).seconds(row) for row in rows]


def _counts(found: Mapping[str, Any] | Totals) -> Floats:
    values = [found[name] if isinstance(found, Mapping) else getattr(found, name) for name in COUNTS]
    return np.array(values, np.float64)
