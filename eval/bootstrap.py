"""How sure a number over prompts is: the one bootstrap of every interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000


class Resamples:
    """Bootstrap resamples of owners, each with all its values: prompts, or groups of prompts that were timed together.

    owners: [N] the owner of each value, anything that can be sorted.
    """

    def __init__(self, owners: Sequence[Any], seed: int):
        _, self._owner = np.unique(np.asarray(owners), return_inverse=True)
        self._count = int(self._owner.max()) + 1 if len(owners) else 0
        self._picks = np.random.default_rng(seed).integers(max(self._count, 1), size=(NUM_RESAMPLES, self._count))

    def sums(self, values: ArrayLike) -> Floats:
        """[NUM_RESAMPLES]: values [N], summed over each resample."""
        return np.bincount(self._owner, np.asarray(values, np.float64), self._count)[self._picks].sum(1)

    def quantiles(self, values: ArrayLike, points: Sequence[float]) -> Floats:
        """[NUM_RESAMPLES, len(points)]: quantiles of the values [N] in each resample; there are values."""
        own = np.asarray(values, np.float64)
        taken = (np.bincount(picks, minlength=self._count)[self._owner] for picks in self._picks)
        # A resample may hold no value: its owners' other requests had none to give.
        found = (np.quantile(np.repeat(own, times), points) for times in taken if times.any())
        return np.array(list(found))

    def interval(self, statistic: Callable[[], Floats]) -> list[float] | None:
        """95 % interval of what is worked out from `sums`; None for fewer than two owners."""
        if self._count < 2:
            return None
        low, high = np.percentile(statistic(), [2.5, 97.5])
        return [float(low), float(high)]


def mean_interval(values: Sequence[float], owners: Sequence[Any], seed: int) -> tuple[float, float] | tuple[None, None]:
    """Ends of the 95 % interval of the mean of values [N]; None for fewer than two owners."""
    drawn = Resamples(owners, seed)
    found = drawn.interval(lambda: drawn.sums(values) / drawn.sums(np.ones(len(values))))
    return (found[0], found[1]) if found else (None, None)
