"""A decoder whose times are known, in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftsmith.eval.load.ours import serve
from draftsmith.eval.load.requests import Arrivals, Block, Plan, Request
from draftsmith.modules.decoding.loop import RowAnswer
from draftsmith.modules.decoding.trace import DecodeStep
from draftsmith.modules.sampling import TorchSource

SOURCE = TorchSource(0)


class Simulated:
    """A clock that passes only when somebody says so."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait(self, until: float) -> None:
        assert until > self.at, "nobody waits for what is over"
        self.at = until


class FakePool:
    """Rows of one token by an admission that takes `prefill` seconds however many are admitted, and of `each` tokens
    by a round that takes `rounds`. stall: (from when on, seconds) that the first call from then on takes longer."""

    def __init__(self, clock: Simulated, size: int, prefill: float, rounds: float, each: int = 1,
                 stall: tuple[float, float] | None = None):  # fmt: skip
        self.clock, self.size, self.times, self.each, self.stall = clock, size, (prefill, rounds), each, stall
        self.rows: list[RowAnswer] = []
        self.going: list[tuple[float, int]] = []  # rows under way in each call, from when on

    @property
    def num_going(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> int:
        return self.size - len(self.rows)

    def admit(self, fresh: Sequence[RowAnswer]) -> list[RowAnswer]:
        self.rows += fresh
        return self.call(self.times[0], fresh, 1)

    def round(self) -> list[RowAnswer]:
        return self.call(self.times[1], self.rows, self.each)

    def call(self, seconds: float, rows: Sequence[RowAnswer], tokens: int) -> list[RowAnswer]:
        self.going.append((self.clock.at, len(self.rows)))
        if self.stall is not None and self.clock.at >= self.stall[0]:
            seconds, self.stall = seconds + self.stall[1], None
        self.clock.at += seconds
        for row in rows:
            emitted = row.emit([7] * tokens)
            row.trace.steps.append(DecodeStep(tokens, tokens - 1, len(emitted), 1))
        done = [row for row in self.rows if row.done]
        self.rows = [row for row in self.rows if not row.done]
        return done


class Given:
    """Requests at these times."""

    def __init__(self, times: Iterable[float]):
        self.times = list(times)

    @property
    def next(self) -> float | None:
        return self.times[0] if self.times else None

    def take(self) -> float:
        return self.times.pop(0)

    def finished(self, at: float) -> None:
        pass


def simulated(pool: FakePool, arrivals: Arrivals, plan: Plan, tokens: int) -> Block:
    """A block of answers of so many tokens."""

    def ask(request: Request) -> RowAnswer:
        return RowAnswer(frozenset(), tokens, request.number, [1, 2], SOURCE)

    return serve(pool, arrivals, plan, ask, pool.clock)
