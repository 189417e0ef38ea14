"""What rounds of rows that are decoded together take, part by part: the cost surface that `shared` goes by."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftsmith.eval.cost.clock import Clock, Stopwatch, Timed
from draftsmith.modules.acceptance.budget import BatchTimes, SharedStop, between
from draftsmith.modules.acceptance.policies import OnlinePredictor
from draftsmith.modules.decoding.loop import RowPool, asked
from draftsmith.modules.decoding.protocols import StopPolicy
from draftsmith.modules.drafters.chains import build_chains
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

ALIKE = 1, 4, 12  # drafted tokens of every row
LONG = ALIKE[-1]
MIXED = 4, 1, 8, 3  # the same of rows in turn
PASSES = 9  # timed rounds of each kind, and one before them
FILL = 1 / 8, 1 / 2  # of the capacity: the rows' prompts are of lengths between these
SEED = 0


class GivenLengths:
    """A `Budget` that gives every row's draft a length of its own."""

    def __init__(self) -> None:
        self.lengths: Sequence[int] = ()
        self._drafted = 0

    def start(self, able: Sequence[int], stops: Sequence[StopPolicy]) -> Sequence[int]:
        self._drafted = 1
        return [row for row in able if self.lengths[row]]

    def share(self, rows: Sequence[int], stops: Sequence[StopPolicy]) -> Sequence[int]:
        self._drafted += 1
        return [row for row in rows if self.lengths[row] >= self._drafted]

    def observe(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        pass


def sizes(rows: int) -> list[int]:
    """Powers of two up to `rows`, and that."""
    return sorted({*itertools.takewhile(rows.__gt__, (1 << i for i in itertools.count())), rows})


def measure_batch_times(models: Models, drafter: str, rows: int, clock: Clock) -> BatchTimes:
    """Times of rounds of 1, 2, 4, .. `rows` rows, whose contexts and drafts are of different lengths, of greedy answers
    that never end, with policies that predict as those of `shared` do. What a round takes beyond its draft counts as
    reading.

    drafter: what drafts chains.
    """
    plain, uneven = dict[int, float](), dict[int, float]()
    read, first, step = (dict[int, dict[int, float]]() for _ in range(3))
    for count in sizes(rows):
        others, mixed = count - 1, [MIXED[row % len(MIXED)] for row in range(count)]
        # In this order: what a draft reads first is what the rounds before it left unread.
        kinds = {"none": [0] * count, "one": [1] + [0] * others, "mixed": mixed}
        kinds |= {f"all {length}": [length] * count for length in ALIKE}
        half = max(count // 2, 1)
        kinds |= {"half long": [LONG] * half + [1] * (count - half), "one long": [LONG] + [1] * others}
        whole, draft = round_times(models, drafter, kinds, clock)
        plain[count] = whole["none"]
        more = {kind: max(whole[kind] - draft[kind] - whole["none"], 0.0) for kind in whole}
        curve = {0: 0.0, **{length: more[f"all {length}"] for length in ALIKE}}
        # Drafts of unequal lengths take more than their tokens say.
        alike = between(curve, sum(mixed) / count)
        uneven[count] = max(more["mixed"] / alike, 1.0) if alike else 1.0
        read[count] = {length: curve[length] for length in ALIKE}
        first[count] = {1: draft["one"], count: draft["all 1"]}
        longer = {1: draft["one long"], half: draft["half long"], count: draft[f"all {LONG}"]}
        step[count] = {n: max(taken - draft["all 1"], 0.0) / (LONG - 1) for n, taken in longer.items()}
    return BatchTimes(plain, read, first, step, uneven)


@torch.inference_mode()
def round_times(
    models: Models, drafter: str, kinds: Mapping[str, Sequence[int]], clock: Clock
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a batch's rounds, and of the proposals in them, by the lengths of their drafts. The kinds take
    turns, in the same batch: on a machine whose speed drifts their ratios are fair."""
    rows = len(next(iter(kinds.values())))
    longest = min(models.capacity, models.target.info.max_position)
    watch, budget = Stopwatch(clock), GivenLengths()
    drafts = build_chains(replace(models, ends=()), drafter, [SharedStop(OnlinePredictor(), LONG) for _ in range(rows)])
    drafts.budget = budget
    pool = RowPool(models.target, Timed(drafts, watch, "propose"), SamplingParams(), rows, longest)
    texts = prompts(models, rows, longest)
    pool.admit([asked(models.target.info, own, longest - len(own), TorchSource(0), ()) for own in texts])
    whole, draft = ({kind: list[float]() for kind in kinds} for _ in range(2))
    for number in range(1 + PASSES):
        for kind in kinds:
            # In a short context rows end before all is timed: fewer rounds say less, and no round nothing.
            if pool.num_going < rows and (number or not pool.num_going):
                break
            budget.lengths = kinds[kind]
            started = clock()
            pool.round()
            whole[kind].append(clock() - started)
            draft[kind].append(watch.take())
    return middle(whole), middle(draft)


def middle(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians without the first of each, which may be the one that reads the prompts; the first kind's where one was
    never timed."""
    found = {kind: statistics.median(own[1:] or own) for kind, own in taken.items() if own}
    return {kind: found.get(kind, next(iter(found.values()))) for kind in taken}


def prompts(models: Models, rows: int, longest: int) -> list[list[int]]:
    """Random tokens, whose values change no forward's time."""
    low, high = (max(1, round(part * longest)) for part in FILL)
    draws = torch.Generator().manual_seed(SEED)
    made = [low + (high - low) * row // max(rows - 1, 1) for row in range(rows)]
    return [torch.randint(models.target.info.vocab_size, (length,), generator=draws).tolist() for length in made]


FLAT, NESTED = ("plain", "uneven"), ("read", "first", "step")


def as_json(times: BatchTimes) -> dict[str, Any]:
    """Its curves; JSON writes their numbers as text."""
    return {name: getattr(times, name) for name in (*FLAT, *NESTED)}


def from_json(found: dict[str, Any]) -> BatchTimes:
    """What `as_json` gave, before it was written or after."""
    curves: dict[str, Any] = {name: {int(rows): own for rows, own in found[name].items()} for name in (*FLAT, *NESTED)}
    for name in NESTED:
        curves[name] = {rows: {int(n): s for n, s in own.items()} for rows, own in curves[name].items()}
    return BatchTimes(**curves)
