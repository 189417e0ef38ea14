"""Bootstrap intervals of numbers over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000


class Resamples:
    """Bootstrap resamples of owners, each with all its values: prompts, or groups that were timed together.

    owners: [N] the owner of each value, anything that can be sorted. num_values: N.
    """

    def __init__(self, owners: Sequence[Any], seed: int):
        _, self._owner = np.unique(np.asarray(owners), return_inverse=True)
        self.num_values = len(self._owner)
        self._count = int(self._owner.max()) + 1 if len(owners) else 0
        # All statistics use the same draws, so that ratios of them are paired.
        self._picks = np.random.default_rng(seed).integers(max(self._count, 1), size=(NUM_RESAMPLES, self._count))

    def sums(self, values: ArrayLike) -> Floats:
        """Sum values [N] over each resample: [NUM_RESAMPLES]."""
        return np.bincount(self._owner, np.asarray(values, np.float64), self._count)[self._picks].sum(1)

    def interval(self, statistic: Floats) -> list[float] | None:
        """Return the 95 % interval of a statistic of `sums`, [NUM_RESAMPLES]; None for fewer than two owners."""
        if self._count < 2:
            return None
        low, high = np.percentile(statistic, [2.5, 97.5])
        return [float(low), float(high)]
