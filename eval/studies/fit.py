"""Seconds as a linear function of counts, fitted by least squares: what a forward, a drafted token, a round takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class LinearCost:
    """Seconds of one of each count, and `fixed` once. r2: share of the variance of the seconds that the fit explains;
    NaN where they do not vary."""

    weights: tuple[float, ...]
    fixed: float = 0.0
    r2: float = math.nan

    def seconds(self, *counts: float) -> float:
        """Seconds of so many of each."""
        return self.fixed + sum(weight * count for weight, count in zip(self.weights, counts, strict=True))


def least_squares(
    counts: ArrayLike,
    seconds: ArrayLike,
    *,
    fixed: bool = False,
    relative: bool = False,
) -> LinearCost:
    """Least squares over N measurements.

    counts: [N, C]. seconds: [N]. fixed: seconds that all measurements share are fitted too. relative: the relative
    errors are the least, not the absolute ones.
    """
    x, y = np.asarray(counts, np.float64), np.asarray(seconds, np.float64)
    known = np.column_stack([x, np.ones(len(x))]) if fixed else x
    scale = y[:, None] if relative else 1.0
    found = np.linalg.lstsq(known / scale, np.ones(len(y)) if relative else y, rcond=None)[0].tolist()
    cost = LinearCost(tuple(found[: x.shape[1]]), found[-1] if fixed else 0.0)
    return LinearCost(cost.weights, cost.fixed, explained(cost, x, y))


def explained(cost: LinearCost, counts: ArrayLike, seconds: ArrayLike) -> float:
    """R2 over measurements that the cost need not be fitted to: 1 - residual / total sum of squares about the mean."""
    x, y = np.asarray(counts, np.float64), np.asarray(seconds, np.float64)
    total = np.square(y - y.mean()).sum()
    residual = np.square(y - x @ np.array(cost.weights) - cost.fixed).sum()
    return float(1 - residual / total) if total else math.nan
