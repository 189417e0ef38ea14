"""Seconds of tree decoding as a linear function of its counts, fitted to measured runs: what carries a measurement of a
few sizes over to all that were replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.cost.fit import LinearCost, least_squares
from draftsmith.modules.decoding.trace import Totals

COUNTS = ("num_target_calls", "num_draft_tokens", "draft_calls")


def fit_tree_cost(rows: Sequence[Mapping[str, Any]]) -> LinearCost:
    """Seconds of one target call, of one drafted token (to score it, and to have chosen it) and of one forward of the
    head, for trees of one topk; once more `fixed` for what all runs over the same prompts share, prefills above all.
    The SpecDec++ regression (eq. 2.3) with trees' counts, by relative errors.

    rows: of one bench, at least as many as there are unknowns, `ar` among them, whose drafts count 0.
    """
    assert len(rows) > len(COUNTS)
    return least_squares([counts_of(row) for row in rows], [seconds_of(row) for row in rows], fixed=True, relative=True)


def seconds_of(row: Mapping[str, Any]) -> float:
    """Seconds of a row by the bench's clock."""
    return row["tokens"] / row["tokens_per_s"]


def predicted_by_others(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Seconds of every row as the others predict them; None where the others are too few to say."""
    if len(rows) - 1 <= len(COUNTS):
        return [None] * len(rows)
    return [fit_tree_cost([other for other in rows if other is not row]).seconds(*counts_of(row)) for row in rows]


def counts_of(found: Mapping[str, Any] | Totals) -> list[float]:
    """The counts that cost time, of a row or of totals."""
    return [found[name] if isinstance(found, Mapping) else getattr(found, name) for name in COUNTS]
