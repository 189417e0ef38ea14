"""Clocks of the latency benchmark: interleaved runs, and the share of a generation that is spent in forwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.eval.bench.measure import synchronize

Clock = Callable[[], float]


def clock_of(device: str) -> Clock:
    """Seconds: of this process's CPU time, which a busy machine does not falsify; on a GPU of the wall, once it is
    idle."""
    return time.process_time if torch.device(device).type == "cpu" else synchronised


def synchronised() -> float:
    """Wall seconds, once the GPU is idle."""
    synchronize()
    return time.perf_counter()


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` times in rotating order after one uncounted run each: item i of all lists was
    taken in the same minute, so ratios of them are fair on a machine whose speed drifts."""
    for call in calls.values():
        call()
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            started = clock()
            calls[name]()
            seconds[name].append(clock() - started)
    return seconds


def paired_ratio(slower: list[float], faster: list[float]) -> float:
    """Median over repeats of slower / faster."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def median_s(call: Callable[[], Any], repeats: int, clock: Clock) -> float:
    """Median seconds of a call, after one uncounted run."""
    return statistics.median(interleaved({"call": call}, repeats, clock)["call"])


class Forwards:
    """Seconds spent in the watched methods; a call inside a watched call is counted once."""

    def __init__(self, clock: Clock):
        self._clock, self._depth = clock, 0
        self.seconds = 0.0

    @contextmanager
    def watch(self, *methods: tuple[Any, str]) -> Iterator[Forwards]:
        """(object, name of its method): calls through the object are timed until the context ends."""
        before = [vars(owner).get(name) for owner, name in methods]
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        try:
            yield self
        finally:
            for (owner, name), own in zip(methods, before, strict=True):
                if own is None:
                    delattr(owner, name)  # the class's own method again
                else:
                    setattr(owner, name, own)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            self._depth += 1
            started = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += self._clock() - started
                self._depth -= 1

        return timed
