"""The best number of drafted tokens at every number of requests, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.schedule.costs import RoundTimes
from draftsmith.eval.schedule.rounds import RoundCounts

Range = tuple[int, int, int]  # from and to so many requests, both included: drafted tokens


def paces(tokens_per_round: Floats, times: RoundTimes) -> Floats:
    """[B, K+1]: tokens that each request gets by second, of 1 to B requests, by drafted tokens from 0; of no more
    tokens than were timed."""
    lengths = range(min(len(tokens_per_round) - 1, times.most_drafted) + 1)
    seconds = [[times.of(size, k) for k in lengths] for size in range(1, times.most_requests + 1)]
    found: Floats = tokens_per_round[: len(lengths)] / np.array(seconds)
    return found


def best_lengths(pace: Floats, most: int | None = None) -> list[int]:
    """[B]: the K that gives most tokens by second, the smallest of equal ones. pace [B, K+1]. most: no larger K."""
    own = pace if most is None else pace[:, : most + 1]
    return [int(k) for k in own.argmax(1)]


def best_single(pace: Floats, sizes: Sequence[int]) -> int:
    """The one K whose gain over none has the largest geometric mean over these numbers of requests."""
    own = pace[[size - 1 for size in sizes]]
    return int(np.log(own / own[:, :1]).mean(0).argmax())


def ranges(lengths: Sequence[int]) -> list[Range]:
    """lengths [B]: of 1 to B requests."""
    found: list[Range] = []
    for size, k in enumerate(lengths, start=1):
        if found and found[-1][2] == k:
            found[-1] = (found[-1][0], size, k)
        else:
            found.append((size, size, k))
    return found


@dataclass(frozen=True)
class Schedule:
    """Drafted tokens by requests, at one temperature.

    lengths [B]: the best K. drafting [B]: the best K of at least 1; loss: the largest share of the pace that this
    costs. most_drafted: the largest K there was to choose. single: the best K for all. rows: a dict for every number of
    requests that was timed. over_single: mean gain over that K, and its interval.
    """

    temperature: float
    lengths: Sequence[int]
    drafting: Sequence[int]
    loss: float
    most_drafted: int
    single: int
    rows: Sequence[dict[str, Any]]
    over_single: tuple[float, list[float] | None]

    @property
    def ranges(self) -> list[Range]:
        return ranges(self.lengths)

    @property
    def drafting_ranges(self) -> list[Range]:
        return ranges(self.drafting)

    @property
    def last(self) -> int:
        """The largest number of requests at which drafting pays; 0 for none."""
        return max((size for size, k in enumerate(self.lengths, start=1) if k), default=0)

    @property
    def advice(self) -> str:
        most = len(self.lengths)
        if not self.last:
            return f"Do not speculate: it pays at no number of requests up to {most}."
        said = f"Do not speculate above {self.last} requests at once."
        if self.last == most:
            said = f"Speculating pays up to {most} requests at once, as far as was timed."
        if max(self.lengths) == self.most_drafted:
            said += f" More than {self.most_drafted} tokens may pay: longer drafts were not recorded, or not timed."
        return said


def choose(temperature: float, counts: RoundCounts, times: RoundTimes, seed: int) -> Schedule:
    """The schedule, with intervals over prompts of what it gains; the choice itself is that of all prompts."""
    tau, sizes = counts.tokens_per_round, sorted(times.seconds)
    pace = paces(tau, times)
    lengths, single = best_lengths(pace), best_single(pace, sizes)
    drawn = Resamples(counts.owners, seed)
    tokens = drawn.sums(counts.tokens)
    resampled = np.stack([tokens / drawn.sums(counts.rounds[:, k]) for k in range(pace.shape[1])], 1)

    def gain(size: int, k: int, base: int) -> tuple[float, list[float] | None]:
        cheaper = times.of(size, base) / times.of(size, k)
        ends = drawn.interval(lambda: resampled[:, k] / resampled[:, base] * cheaper - 1)
        return float(pace[size - 1, k] / pace[size - 1, base] - 1), ends

    rows = []
    for size in sizes:
        k = lengths[size - 1]
        row: dict[str, Any] = {"requests": size, "k": k, "tokens_per_round": float(tau[k])}
        row["over_none"], row["over_none_ci95"] = gain(size, k, 0)
        row["over_single"], row["over_single_ci95"] = gain(size, k, single)
        rows.append(row)
    own = [lengths[size - 1] for size in sizes]
    mean = np.log([1 + row["over_single"] for row in rows]).mean()
    cheaper = [np.log(times.of(size, single) / times.of(size, k)) for size, k in zip(sizes, own, strict=True)]
    ends = drawn.interval(
        lambda: np.expm1((np.log(resampled[:, own] / resampled[:, [single]]) + np.array(cheaper)).mean(1))
    )
    over_single = float(np.expm1(mean)), ends
    most_drafted = pace.shape[1] - 1
    drafting = [1 + k for k in best_lengths(pace[:, 1:])]
    loss = max(float(1 - at[kept] / at[best]) for at, kept, best in zip(pace, drafting, lengths, strict=True))
    return Schedule(temperature, lengths, drafting, loss, most_drafted, single, rows, over_single)
