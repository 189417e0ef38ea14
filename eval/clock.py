"""Clocks of everything that is timed, and measurements that take turns at them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

Clock = Callable[[], float]  # seconds from some start
ClockName = Literal["cpu", "wall"]
T = TypeVar("T")


def clock_name(device: str | torch.device, num_threads: int | None = None) -> ClockName:
    """Return `cpu` on one CPU thread, else `wall`. num_threads: None takes torch's own number."""
    # The CPU time of this process does not change when other programs keep the machine busy.
    threads = torch.get_num_threads() if num_threads is None else num_threads
    return "cpu" if torch.device(device).type == "cpu" and threads == 1 else "wall"


def clock_of(device: str | torch.device, num_threads: int | None = None) -> Clock:
    return time.process_time if clock_name(device, num_threads) == "cpu" else wall_time


def wall_time() -> float:
    """Return wall seconds, after waiting for the GPU."""
    # A GPU's work is queued: without waiting, the clock would be read too early.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return the names with another one first every turn, so that none always follows the same one."""
    turn %= len(names)
    return [*names[turn:], *names[:turn]]


def interleaved(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock, warm: bool = False
) -> dict[str, list[float]]:
    """Time every call `repeats` times, in rotating order, after one uncounted run each.

    Item i of all lists was taken in the same minute, so their ratios are fair on a machine whose speed drifts.

    warm: each call has just run, so that no uncounted run is needed.
    """
    for call in () if warm else calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in rotated(list(calls), repeat):
            started = clock()
            calls[name]()
            seconds[name].append(clock() - started)
    return seconds


class Stopwatch:
    """Seconds spent in timed calls; a timed call inside another one counts once."""

    def __init__(self, clock: Clock):
        self.clock, self.seconds = clock, 0.0
        self._running = False

    def timed(self, call: Callable[..., T]) -> Callable[..., T]:
        """Wrap a call so that its seconds count."""

        def run(*args: Any, **kwargs: Any) -> T:
            if self._running:
                return call(*args, **kwargs)
            self._running, started = True, self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += self.clock() - started
                self._running = False

        return run

    def take(self) -> float:
        """Return the seconds so far and start again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Timed:
    """Proxy of an object that times some of its methods."""

    def __init__(self, inner: Any, watch: Stopwatch, *methods: str):
        self._inner = inner
        for name in methods:
            setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
