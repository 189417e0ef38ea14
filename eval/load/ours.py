"""This project's decoder under load: continuous batching, and clocks of whoever measures it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from draftsmith.eval.cost.clock import Clock as Reading
from draftsmith.eval.cost.clock import ClockName, wall_time
from draftsmith.eval.load.requests import Arrivals, Block, Plan, Request
from draftsmith.modules.decoding.loop import RowAnswer


class Clock(Protocol):
    """Seconds of a block, from 0."""

    def now(self) -> float: ...

    def wait(self, until: float) -> None:
        """Nothing happens before that."""


class WallClock:
    """The wall's time."""

    def __init__(self) -> None:
        self._start = wall_time()

    def now(self) -> float:
        return wall_time() - self._start

    def wait(self, until: float) -> None:
        time.sleep(max(until - self.now(), 0.0))


class WorkClock:
    """Time that passes as this process works; where it would wait, time is skipped. What other programs do on the
    machine is not seen. work: seconds of work so far."""

    def __init__(self, work: Reading = time.process_time):
        self._work, self._start = work, work()

    def now(self) -> float:
        return self._work() - self._start

    def wait(self, until: float) -> None:
        self._start -= max(until - self.now(), 0.0)


CLOCKS: dict[ClockName, Callable[[], Clock]] = {"wall": WallClock, "cpu": WorkClock}


class Pool(Protocol):
    """What is measured: `decoding.loop.RowPool`."""

    @property
    def free(self) -> int: ...

    @property
    def num_going(self) -> int: ...

    def admit(self, fresh: Sequence[RowAnswer]) -> list[RowAnswer]: ...

    def round(self) -> list[RowAnswer]: ...


def serve(pool: Pool, arrivals: Arrivals, plan: Plan, ask: Callable[[Request], RowAnswer], clock: Clock) -> Block:
    """A block. Whoever has come is admitted, in turn, as soon as there is a place, and before the next round; tokens
    are there at the end of the call that made them.

    ask: a request's row, whose number is the request's.
    """
    going: dict[int, tuple[Request, RowAnswer]] = {}
    counted: list[Request] = []
    number = tokens = 0
    began = (0.0, 0.0, 0)  # time, CPU time and tokens when the first one that counts starts
    while plan.waiting:
        now, due, fresh = clock.now(), arrivals.next, list[RowAnswer]()
        while len(fresh) < pool.free and due is not None and due <= now:
            request = plan.request(number, arrivals.take(), now)
            if plan.counts(request):
                began = began if counted else (now, time.process_time(), tokens)
                counted.append(request)
            row = ask(request)
            going[number] = request, row
            fresh.append(row)
            number, due = number + 1, arrivals.next
        if not fresh and not pool.num_going:
            assert due is not None, "a user whose answer is complete asks again"
            clock.wait(due)
            continue
        complete = pool.admit(fresh) if fresh else pool.round()
        now = clock.now()
        for request, row in going.values():
            if more := len(row.tokens) - len(request.token_ids):
                request.times.append(now)
                request.counts.append(more)
                request.token_ids += row.tokens[-more:]
                tokens += more
        for row in complete:
            request, _ = going.pop(row.number)
            noted(request, row)
            arrivals.finished(now)
            plan.waiting.discard(request.number)
    return Block(counted, now - began[0], time.process_time() - began[1], tokens - began[2])


def noted(request: Request, row: RowAnswer) -> None:
    """Let a request know what its answer took."""
    request.target_calls, request.draft_tokens = row.trace.num_target_calls, row.trace.num_draft_tokens
    request.accepted = row.trace.num_accepted
    request.rounds = sum(step.num_drafted > 0 for step in row.trace.steps)
