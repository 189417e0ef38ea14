"""What a round takes by the requests that are decoded together and the tokens that each drafts: as measured here, or
as someone measured it on a server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.store.reading import check_shape, read_object
from draftsmith.eval.bench.results import RESULTS
from draftsmith.eval.cost.auto import times_of_run
from draftsmith.eval.cost.batches import LONG, from_json
from draftsmith.modules.acceptance.budget import BatchTimes, between
from draftsmith.modules.types import InputError

SHAPE = {"seconds": {"*": {"*": float}}, "machine?": str}
CURVES = {"*": {"*": float}}
BATCH_TIMES = {"*": {"plain": {"*": float}, "read": CURVES, "first": CURVES, "step": CURVES}}
MOST_REQUESTS = 4096
EXAMPLE = '{"seconds": {"1": {"0": 0.011, "4": 0.013}, "64": {"0": 0.021, "4": 0.034}}}'


@dataclass(frozen=True)
class RoundTimes:
    """seconds: of a round, by requests and drafted tokens of each; 1 request and 0 tokens are among them. source: where
    they were measured."""

    seconds: Mapping[int, Mapping[int, float]]
    source: str

    @property
    def most_requests(self) -> int:
        return max(self.seconds)

    @property
    def most_drafted(self) -> int:
        """The largest K that was timed with every number of requests."""
        return min(max(curve) for curve in self.seconds.values())

    def of(self, requests: int, k: int) -> float:
        """Straight lines between what was measured."""
        return between({size: between(curve, k) for size, curve in self.seconds.items()}, requests)


def read_times(path: Path, drafter: str) -> RoundTimes:
    """Of a finished run that kept times of this drafter's rounds, or of a JSON file.

    Raises:
        InputError: there is neither, or it says something else.
    """
    return of_run(path, drafter) if path.is_dir() else of_file(path)


def of_run(directory: Path, drafter: str) -> RoundTimes:
    """The times that `shared` went by, in the largest batch."""
    found = times_of_run(directory)["batch_times"]
    check_shape(directory / RESULTS, found, BATCH_TIMES, "Measure it again.", "batch_times")
    sizes = {name: max(map(int, own["plain"])) for name, own in found.items() if name.startswith(f"{drafter}, up to ")}
    if not sizes:
        remedy = "Let that run measure `shared` too, as `eval load --methods shared` does, or pass a JSON file."
        raise InputError("costs", f"{directory} without times of rounds of {drafter}", "a run that has them", remedy)
    name = max(sizes, key=sizes.__getitem__)
    return RoundTimes(rounds_of(from_json(found[name])), f"{directory} ({name})")


def rounds_of(times: BatchTimes) -> dict[int, dict[int, float]]:
    """Seconds of rounds in which all rows draft alike."""
    found = dict[int, dict[int, float]]()
    for rows in times.plain:
        reading = times.reading(rows, rows * LONG)
        first, step = (times.drafting(part, rows)[rows] for part in ("first", "step"))
        drafting = {k: first + (k - 1) * step + reading[rows * k] for k in range(1, LONG + 1)}
        found[rows] = {k: times.plain[rows] + more for k, more in {0: 0.0, **drafting}.items()}
    return found


def of_file(path: Path) -> RoundTimes:
    """`{"seconds": {REQUESTS: {K: seconds}}, "machine": TEXT}`, the last one optional."""
    remedy = f"Write it as {EXAMPLE}: seconds of a round by requests and drafted tokens."
    if not path.exists():
        found = f"no {path}"
        raise InputError("costs", found, "a finished run, or a JSON file of times", "Check the path.")
    read = read_object(path, SHAPE, remedy)
    seconds = dict[int, dict[int, float]]()
    for size, curve in read["seconds"].items():
        for name in (size, *curve):
            if not name.isdecimal():
                raise InputError(str(path), repr(name), "whole numbers of requests and of drafted tokens", remedy)
        wrong = [own for own in curve.values() if not (own > 0 and math.isfinite(own))]
        if wrong:
            raise InputError(str(path), f"{wrong[0]} s with {size} requests", "seconds, above 0", remedy)
        seconds[int(size)] = {int(k): float(own) for k, own in curve.items()}
        if 0 not in seconds[int(size)] or len(curve) < 2:
            found = f"K of {', '.join(curve) or 'nothing'} with {size} requests"
            raise InputError(str(path), found, "0 and at least one more", remedy)
    if 1 not in seconds or 0 in seconds or max(seconds) > MOST_REQUESTS:
        found = f"{', '.join(read['seconds']) or 'no'} requests"
        raise InputError(str(path), found, f"1, and more, up to {MOST_REQUESTS:,}", remedy)
    return RoundTimes(seconds, read.get("machine", str(path)))
