"""Seconds of a round by the requests that are decoded together and the tokens that each drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.store.reading import read_object
from draftsmith.eval.cost.machine import straight
from draftsmith.modules.types import InputError

SHAPE = {"seconds": {"*": {"*": float}}, "machine?": str}
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
        return straight({size: straight(curve, k) for size, curve in self.seconds.items()}, requests)


def read_times(path: Path) -> RoundTimes:
    """Read `{"seconds": {REQUESTS: {K: seconds}}, "machine": TEXT}`, the last one optional."""
    remedy = f"Write it as {EXAMPLE}: seconds of a round by requests and drafted tokens."
    if not path.exists():
        found = f"no {path}"
        raise InputError("costs", found, "a JSON file of times", "Check the path.")
    read = read_object(path, SHAPE, remedy)
    seconds = dict[int, dict[int, float]]()
    for size, curve in read["seconds"].items():
        for name in (size, *curve):
            if not name.isdecimal():
                raise InputError(str(path), repr(name), "whole numbers of requests and of drafted tokens", remedy)
        wrong = [own for own in curve.values() if not (own > 0 and math.isfinite(own))]
        if wrong:
            raise InputError(str(path), f"{wrong[0]} s with {size} requests", "seconds, above 0", remedy)
        seconds[int(size)] = {int(k): float(own) for k, own in sorted(curve.items(), key=lambda item: int(item[0]))}
        if 0 not in seconds[int(size)] or len(curve) < 2:
            found = f"K of {', '.join(curve) or 'nothing'} with {size} requests"
            raise InputError(str(path), found, "0 and at least one more", remedy)
    if 1 not in seconds or 0 in seconds or max(seconds) > MOST_REQUESTS:
        found = f"{', '.join(read['seconds']) or 'no'} requests"
        raise InputError(str(path), found, f"1, and more, up to {MOST_REQUESTS:,}", remedy)
    return RoundTimes(dict(sorted(seconds.items())), read.get("machine", str(path)))
