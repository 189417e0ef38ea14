"""What is sent when, and what comes back: the loads, and the records of requests.

A request's latency counts from when it was to begin: in an open loop from its place in a schedule that is drawn from a
seed, whatever becomes of earlier requests; in a closed loop from when its user had the last answer. A client or a
server that falls behind cannot hide it so (coordinated omission, Tene 2013).

Only the middle of a run counts. The first requests warm up; behind the last one that counts more are sent, and dropped
once all that count are complete: each of these has lived under the whole load.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Kind = Literal["closed", "open"]


class Arrivals(Protocol):
    """The times at which requests are to begin, in seconds of a block.

    next: of the next one; None where it depends on an answer that is not complete.
    """

    @property
    def next(self) -> float | None: ...

    def take(self) -> float:
        """The next one's time; it is sent."""

    def finished(self, at: float) -> None:
        """An answer was complete then."""


class Poisson:
    """So many requests a second on average, at times of their own."""

    def __init__(self, rate: float, seed: int):
        self._draws, self._mean = np.random.default_rng(seed), 1 / rate
        self.next = float(self._draws.exponential(self._mean))

    def take(self) -> float:
        at = self.next
        self.next += float(self._draws.exponential(self._mean))
        return at

    def finished(self, at: float) -> None:
        pass


class Users:
    """So many users, each of whom asks again as soon as the last answer is complete."""

    def __init__(self, count: int):
        self._free = [0.0] * count

    @property
    def next(self) -> float | None:
        return self._free[0] if self._free else None

    def take(self) -> float:
        return heapq.heappop(self._free)

    def finished(self, at: float) -> None:
        heapq.heappush(self._free, at)


@dataclass(frozen=True)
class Load:
    """A point of the curve. value: users of a closed loop, requests a second of an open one."""

    kind: Kind
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "closed" else f"{self.value:g}/s"

    def arrivals(self, seed: int) -> Arrivals:
        return Users(int(self.value)) if self.kind == "closed" else Poisson(self.value, seed)


@dataclass
class Request:
    """One request. Times are seconds of its block's clock.

    number: in its block, warm-up included. prompt: number of the prompt. intended: when it was to begin. started: when
    it was sent, or read. times, counts: when tokens came, and how many. text: of an answer without token ids.
    rounds: that drafted; accepted: drafted tokens that were emitted. error: why there is no whole answer.
    """

    number: int
    prompt: int
    intended: float
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    target_calls: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    rounds: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def first_token(self) -> float:
        """Time to first token."""
        return self.times[0] - self.intended

    @property
    def latency(self) -> float:
        """From its intended start to its last token."""
        return self.times[-1] - self.intended

    @property
    def decoding(self) -> float:
        """From the first tokens to the last."""
        return self.times[-1] - self.times[0]

    @property
    def per_token(self) -> float | None:
        """Time per output token behind the first; None of an answer of one."""
        return self.decoding / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between one arrival of tokens and the next, however many came."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Plan:
    """Which requests of a block count: so many behind the warm-up. order: numbers of prompts; the first that counts
    has the first, whatever the warm-up, so that all methods and loads are measured on the same."""

    order: Sequence[int]
    warmup: int
    count: int
    waiting: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = set(range(self.warmup, self.warmup + self.count))

    def request(self, number: int, intended: float, started: float) -> Request:
        return Request(number, self.order[(number - self.warmup) % len(self.order)], intended, started)

    def counts(self, request: Request) -> bool:
        return 0 <= request.number - self.warmup < self.count


@dataclass
class Block:
    """One method under one load for a while.

    requests: those that count, by number. seconds, cpu_seconds, tokens: from the start of the first one to the end of
    the last, of all requests that were under way. drafts, accepted: of a server that counts its rounds, of the block.
    """

    requests: list[Request]
    seconds: float
    cpu_seconds: float
    tokens: int
    drafts: int = 0
    accepted: int = 0


# A request in a journal and in requests.parquet; behind what it is of.
REQUEST: dict[str, Any] = {
    "number": int,
    "prompt": int,
    "intended": float,
    "started": float,
    "times": [float],
    "counts": [int],
    "token_ids": [int],
    "text": str,
    **dict.fromkeys(("target_calls", "draft_tokens", "accepted", "rounds"), int),
    "error": (str, None),
}
BLOCK: dict[str, Any] = {
    "requests": [REQUEST],
    **dict.fromkeys(("seconds", "cpu_seconds"), float),
    **dict.fromkeys(("tokens", "drafts", "accepted"), int),
}


def block_of(found: dict[str, Any]) -> Block:
    """A block as the journal holds it."""
    return Block(**{**found, "requests": [Request(**request) for request in found["requests"]]})
