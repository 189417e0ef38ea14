"""A training of so many minutes: as many steps as fit, the last validation and saves included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# The share of the time after which a first validation is timed, if there was none; and how many times the longest
# validation with its saves is kept for the last one, before that a share of the time.
TRIAL_SHARE, RESERVED_TIMES, RESERVED_SHARE = 0.1, 1.25, 0.15


class TimeLimit:
    """Plans a training's steps by the clock: rank 0's plan counts for all ranks.

    The learning rate and whatever else depends on the share of the training that is done follow the planned number of
    steps, which is corrected after every step.
    """

    def __init__(self, minutes: float, since: float | None = None, clock: Callable[[], float] = time.monotonic):
        """since: when the clock started to run; None: now."""
        self._clock, self._limit = clock, 60 * minutes
        self._since = clock() if since is None else since
        # Seconds that earlier runs took; when this one's steps began; longest validation and saves.
        self._earlier, self._began, self._pause = 0.0, self._since, 0.0
        # The longest step; how many were done at the last look, and when that was; when `passed` was last asked.
        self._step_s = 0.0
        self._mark: tuple[int, float] | None = None
        self._shown = self._since

    def begin(self) -> float:
        """Start with the steps: what came before them is no part of the schedule. Returns the seconds spent so far."""
        self._began = self._shown = self._clock()
        return self._earlier + self._began - self._since

    def passed(self) -> float:
        """Return the seconds since the last call."""
        before, self._shown = self._shown, self._clock()
        return self._shown - before

    def state(self) -> dict[str, float]:
        return {"spent": self._earlier + self._clock() - self._since, "pause": self._pause}

    def load(self, state: dict[str, Any]) -> None:
        self._earlier, self._pause = state["spent"], state["pause"]

    def pause(self, seconds: float) -> None:
        """Take in what a validation or a save took."""
        self._pause = max(self._pause, seconds)
        if self._mark is not None:
            self._mark = self._mark[0], self._mark[1] + seconds

    def wants_trial(self) -> bool:
        """Return whether it is time to validate, so that the length of the last validation is known."""
        return not self._pause and self._earlier + self._clock() - self._since > TRIAL_SHARE * self._limit

    def total_steps(self, done: int) -> int:
        """Return how many steps the training has, if `done` are done: one more than these if time is for one only."""
        now = self._clock()
        if self._mark is not None and done > self._mark[0]:
            # The longest step so far: the last one must not outrun the limit.
            self._step_s = max(self._step_s, (now - self._mark[1]) / (done - self._mark[0]))
        self._mark = done, now
        reserved = RESERVED_TIMES * self._pause or RESERVED_SHARE * self._limit
        spent, left = self._earlier + now - self._began, self._limit - reserved - self._earlier - (now - self._since)
        if left < 2 * self._step_s:
            return done + 1
        # Before the first step nothing is known of their speed.
        return max(done + 2, round(done * (1 + left / spent))) if done and spent > 0 else 2**31 - 1
