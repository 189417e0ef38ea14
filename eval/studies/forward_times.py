"""SpecDec++'s cost model: T = t_draft N_draft + t_target N_target (eq. 2.1-2.3), its times fitted to measured prompts
(section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.eval.bench.results import read_rows
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.studies.fit import LinearCost, least_squares
from draftsmith.eval.studies.fit import explained as share_explained
from draftsmith.modules.decoding.trace import Totals

Row = Mapping[str, Any]
COUNTS = ("num_draft_tokens", "num_target_calls")


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds for a drafted token and for a target call, and what share of the variance of T over `rows` rows they
    explain."""

    t_draft: float
    t_target: float
    r2: float
    rows: int

    def seconds(self, num_draft_tokens: float, num_target_calls: float) -> float:
        """T."""
        return self.t_draft * num_draft_tokens + self.t_target * num_target_calls

    def tokens_per_s(self, totals: Totals) -> float:
        """N / T, eq. 2.3."""
        return totals.num_tokens / self.seconds(totals.num_draft_tokens, totals.num_target_calls)


def fit_forward_times(rows: Sequence[Row], clock: str) -> ForwardTimes:
    """Least squares without intercept over rows of `bench_rows`, one a method and prompt.

    clock: `cpu` or `wall`.
    """
    found = least_squares(_columns(rows, *COUNTS), _columns(rows, f"{clock}_s")[:, 0])
    t_draft, t_target = found.weights
    return ForwardTimes(t_draft, t_target, found.r2, len(rows))


def explained(rows: Sequence[Row], times: ForwardTimes, clock: str) -> float:
    """R2 of these times over rows that they need not be fitted to."""
    cost = LinearCost((times.t_draft, times.t_target))
    return share_explained(cost, _columns(rows, *COUNTS), _columns(rows, f"{clock}_s")[:, 0])


def _columns(rows: Sequence[Row], *names: str) -> Floats:
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float64)


def gain_interval(rows: Sequence[Row], method: str, baseline: str, clock: str, seed: int) -> list[float] | None:
    """95 % bootstrap interval of the relative gain in tokens/s of `method` over `baseline`, prompts resampled in pairs;
    None for fewer than two prompts."""
    pairs = [
        {row["id"]: (row["tokens"], row[f"{clock}_s"]) for row in rows if row["method"] == name}
        for name in (method, baseline)
    ]
    ids = [name for name in pairs[0] if name in pairs[1]]
    own, other = (np.array([pair[name] for name in ids], dtype=np.float64).reshape(-1, 2) for pair in pairs)
    return ratio_interval(own, other, seed)


def ratio_interval(own: Floats, other: Floats, seed: int) -> list[float] | None:
    """95 % bootstrap interval of (tokens/s of `own`) / (tokens/s of `other`) - 1; both [prompts, 2], tokens and seconds
    of the same prompts, resampled in pairs; None for fewer than two prompts."""
    drawn = Resamples(range(len(own)), seed)

    def speed(found: Floats) -> Floats:
        return drawn.sums(found[:, 0]) / drawn.sums(found[:, 1])

    return drawn.interval(lambda: speed(own) / speed(other) - 1)


def theory_rows(rows: Sequence[Row], times: ForwardTimes, clock: str) -> list[dict[str, Any]]:
    """One row a method, in the order of `rows`: measured throughput beside what the cost model says of the same counts
    (both ratios of sums over prompts), and their relative difference."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        tokens, drafted, calls = (
            sum(row[name] for row in own) for name in ("tokens", "num_draft_tokens", "num_target_calls")
        )
        measured = tokens / sum(row[f"{clock}_s"] for row in own)
        theory = tokens / times.seconds(drafted, calls)
        found.append({"method": method, "measured": measured, "theory": theory, "difference": theory / measured - 1})
    return found


def bench_rows(directory: Path) -> list[Row]:
    """The rows that `eval bench` keeps, without prompts that could not be measured."""
    return [row for row in read_rows(directory) if row["error"] is None]
