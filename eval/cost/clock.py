"""The clocks of everything that is timed, and how runs take turns at them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

Clock = Callable[[], float]  # seconds from some start
ClockName = Literal["cpu", "wall"]
T = TypeVar("T")


def clock_name(device: str | torch.device, num_threads: int | None = None) -> ClockName:
    """One CPU thread: this process's own time, which a busy machine does not falsify. Else the wall's.

    num_threads: None takes torch's own number.
    """
    threads = torch.get_num_threads() if num_threads is None else num_threads
    return "cpu" if torch.device(device).type == "cpu" and threads == 1 else "wall"


def clock_of(device: str | torch.device, num_threads: int | None = None) -> Clock:
    """The clock of this name."""
    return time.process_time if clock_name(device, num_threads) == "cpu" else wall_time


def wall_time() -> float:
    """Wall seconds, once the GPU is idle: its work is queued, and a clock would otherwise be read too early."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Names in turn: another one first every turn, so that none always follows the same one."""
    turn %= len(names)
    return [*names[turn:], *names[:turn]]


def interleaved(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock, warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` times in rotating order after one uncounted run each: item i of all lists was
    taken in the same minute, so ratios of them are fair on a machine whose speed drifts. warm: each has just run."""
    for call in () if warm else calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in rotated(list(calls), repeat):
            started = clock()
            calls[name]()
            seconds[name].append(clock() - started)
    return seconds


def medians(calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock, warm: bool = False) -> dict[str, float]:
    """Median seconds of every call, as of `interleaved`."""
    return {name: statistics.median(taken) for name, taken in interleaved(calls, repeats, clock, warm).items()}


class Stopwatch:
    """Seconds spent in the calls that are made through it; a call inside such a call counts once."""

    def __init__(self, clock: Clock):
        self.clock, self.seconds = clock, 0.0
        self._running = False

    def timed(self, call: Callable[..., T]) -> Callable[..., T]:
        """The same call, whose seconds count."""

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
        """The seconds so far; counting begins anew."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Timed:
    """An object of which some calls are timed; all else is its own."""

    def __init__(self, inner: Any, watch: Stopwatch, *calls: str):
        self._inner = inner
        for name in calls:
            setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
