"""What blocks of requests come to: throughput, latencies, goodput, and where speculation stops paying."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.load.requests import Block, Load, Request

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATENCIES: dict[str, Callable[[Request], float | None]] = {
    "ttft": lambda request: request.first_token,
    "tpot": lambda request: request.per_token,
    "e2e": lambda request: request.latency,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Goals:
    """What a user calls good: most seconds to the first token, and for each further one; None has no say."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def any(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def met(self, request: Request) -> bool:
        slow = self.tpot is not None and (request.per_token or 0.0) > self.tpot
        return not slow and (self.ttft is None or request.first_token <= self.ttft)


def answered(blocks: Sequence[Block]) -> list[Request]:
    return [request for block in blocks for request in block.requests if request.error is None]


def summarise(label: str, load: Load, blocks: Sequence[Block], goals: Goals, seed: int) -> Row:
    """One method at one point. blocks: its repeats.

    In a closed loop all users are busy all the time, so that what they get by time is their number times the sums over
    requests by the sum of latencies (Little 1961): no edge of a block counts. In an open loop it is what came while the
    requests that count were under way.
    """
    requests = answered(blocks)
    row: Row = {"method": label, "load": load.kind, "value": load.value, "requests": len(requests)}
    row["failed"] = sum(len(block.requests) for block in blocks) - len(requests)
    if not requests:
        return row
    sums = {"tokens_per_s": [float(request.tokens) for request in requests], "requests_per_s": [1.0] * len(requests)}
    if goals.any:
        sums["goodput"] = [float(goals.met(request)) for request in requests]
    closed = load.kind == "closed"
    drawn = Resamples([request.prompt for request in requests], seed)
    latencies = [request.latency for request in requests]
    busy = sum(latencies) / load.value if closed else sum(block.seconds for block in blocks)

    def rates(values: Sequence[float]) -> Floats:
        return load.value * drawn.sums(values) / drawn.sums(latencies)

    for name, values in sums.items():
        row[name] = sum(values) / busy
        if closed:
            row[f"{name}_ci95"] = drawn.interval(partial(rates, values))
        elif len(blocks) > 1:
            row[f"{name}_ci95"] = by_repeat(blocks, requests, values, seed)
    decoding, further = sum(r.decoding for r in requests), sum(r.tokens - 1 for r in requests)
    row["user_tokens_per_s"] = further / decoding if decoding > 0 else None
    row["window_tokens_per_s"] = sum(b.tokens for b in blocks) / sum(b.seconds for b in blocks)
    if cpu := sum(block.cpu_seconds for block in blocks):
        row["tokens_per_cpu_s"] = sum(block.tokens for block in blocks) / cpu
    return row | percentiles(requests, seed) | drafted(blocks, requests)


def by_repeat(
    blocks: Sequence[Block], requests: Sequence[Request], values: Sequence[float], seed: int
) -> list[float] | None:
    """Interval of values by time, over repeats."""
    of = {id(request): number for number, block in enumerate(blocks) for request in block.requests}
    sums = [0.0] * len(blocks)
    for request, value in zip(requests, values, strict=True):
        sums[of[id(request)]] += value
    drawn = Resamples(range(len(blocks)), seed)
    return drawn.interval(lambda: drawn.sums(sums) / drawn.sums([block.seconds for block in blocks]))


def percentiles(requests: Sequence[Request], seed: int) -> Row:
    """Of each latency: its mean, p50, p95 and p99 over requests, with intervals; of gaps between tokens, over gaps."""
    row: Row = {}
    for name, measure in LATENCIES.items():
        known = [(request.prompt, value) for request in requests if (value := measure(request)) is not None]
        values = [value for _, value in known]
        row |= distribution(name, values)
        if len({prompt for prompt, _ in known}) > 1:
            found = Resamples([prompt for prompt, _ in known], seed).quantiles(values, list(QUANTILES.values()))
            for place, point in enumerate(QUANTILES):
                row[f"{name}_{point}_ci95"] = [float(end) for end in np.percentile(found[:, place], [2.5, 97.5])]
    return row | distribution("itl", [gap for request in requests for gap in request.gaps])


def distribution(name: str, values: Sequence[float]) -> Row:
    if not values:
        return {f"{name}_{key}": None for key in ("mean", *QUANTILES)}
    found = {point: float(np.quantile(values, place)) for point, place in QUANTILES.items()}
    return {f"{name}_{key}": value for key, value in {"mean": float(np.mean(values)), **found}.items()}


def drafted(blocks: Sequence[Block], requests: Sequence[Request]) -> Row:
    """Acceptance lengths. tau: emitted tokens by target calls, prefills included, of our decoder. round_tokens: of the
    rounds that drafted, one token each and what was accepted: ours, or as a server counts them."""
    row: Row = {"tau": None, "round_tokens": None}
    if calls := sum(request.target_calls for request in requests):
        row["tau"] = sum(request.tokens for request in requests) / calls
    rounds = sum(request.rounds for request in requests) or sum(block.drafts for block in blocks)
    accepted = sum(request.accepted for request in requests) or sum(block.accepted for block in blocks)
    if rounds:
        row["round_tokens"] = 1 + accepted / rounds
    return row


def compared(row: Row, own: Sequence[Request], base: Sequence[Request], seed: int) -> None:
    """Let a method's row say its speed over `ar` under the same load: tokens by the time that their requests were under
    way. In a closed loop this is the ratio of throughputs; in an open one, where these are alike, of latencies. Paired
    by prompt."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)
    for start, requests in ((0, own), (2, base)):
        for request in requests:
            sums[request.prompt][start] += request.tokens
            sums[request.prompt][start + 1] += request.latency
    both = {prompt: found for prompt, found in sums.items() if found[1] and found[3]}
    if not both:
        return
    tokens, latency, base_tokens, base_latency = (list(column) for column in zip(*both.values(), strict=True))
    drawn = Resamples(list(both), seed)

    def ratio(add: Callable[[Sequence[float]], Any]) -> Any:
        return add(tokens) / add(latency) / (add(base_tokens) / add(base_latency))

    row["speedup"] = ratio(sum)
    row["speedup_ci95"] = drawn.interval(lambda: ratio(drawn.sums))


def equality(own: Sequence[Request], alone: Mapping[int, Request]) -> Row:
    """Whether answers under load are those of `ar` alone. alone: by prompt."""
    known = [(request, alone[request.prompt]) for request in own if request.prompt in alone]
    differing = sum((one.token_ids, one.text) != (other.token_ids, other.text) for one, other in known)
    return {"matches_ar": differing == 0, "num_differing": differing} if known else {}


def paying(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each method and kind of load: where it pays best, and the load from which on it does not pay any more."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["method"] != BASELINE and row.get("speedup") is not None:
            curves[row["load"], row["method"]].append((row["value"], row["speedup"]))
    found = []
    for (kind, method), curve in curves.items():
        points = sorted(curve)
        best_at, best = max(points, key=lambda point: point[1])
        found.append({"method": method, "load": kind, "best": best, "best_at": best_at, **crossing(points)})
    return found


def crossing(points: Sequence[tuple[float, float]]) -> Row:
    """Where a ratio falls below 1 and stays there, between the two loads around it on a logarithmic scale. points:
    (load, ratio), by load.

    stops_at is None where it is above 1 at the largest load; pays is False where it is below 1 at all loads.
    """
    last = max((number for number, (_, ratio) in enumerate(points) if ratio >= 1), default=None)
    if last is None:
        return {"stops_at": points[0][0], "pays": False, "last": points[-1][0]}
    if last == len(points) - 1:
        return {"stops_at": None, "pays": True, "last": points[-1][0]}
    (low, above), (high, below) = points[last], points[last + 1]
    share = (above - 1) / (above - below)
    at = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return {"stops_at": at, "share": share, "between": [low, high], "pays": True, "last": points[-1][0]}
