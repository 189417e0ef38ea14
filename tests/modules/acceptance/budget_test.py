"""Rows that share a round's time: against every way of sharing it, and the distribution of what they emit."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from table_models import PROMPT, Branches, TableLM, enumerate_branches, target_distribution, total_variation

from draftsmith.modules.acceptance.budget import BatchTimes, SharedBudget, SharedStop, between
from draftsmith.modules.acceptance.policies import OnlinePredictor
from draftsmith.modules.decoding.loop import Round, Setup, generate
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

TIMES = BatchTimes(
    plain={1: 3.0, 4: 6.0},
    read={1: {1: 0.5, 4: 1.0}, 4: {1: 2.0, 4: 10.0}},
    first={1: {1: 1.0}, 4: {1: 1.2, 4: 2.0}},
    step={1: {1: 0.4}, 4: {1: 0.5, 4: 1.1}},
)


def test_times_between_those_measured_and_beyond():
    assert [between({2: 4.0, 4: 8.0, 5: 7.0}, x) for x in (1, 2, 3, 4.5, 6)] == [4 - 2, 4, 6, 7.5, 7]
    assert list(TIMES.reading(1, 5))[:6] == pytest.approx([0, 0.5, 2 / 3, 5 / 6, 1, 7 / 6])
    # Two rows are a third of the way from one to four; two drafted tokens are one of each.
    assert TIMES.reading(2, 8)[2] == pytest.approx(0.5 + (2.0 - 0.5) / 3)
    assert list(TIMES.drafting("step", 4)) == pytest.approx([0, 0.5, 0.7, 0.9, 1.1])
    assert TIMES.drafting("first", 1) == [0, 1.0]
    # Reading more never takes less, whatever the clock said.
    assert list(BatchTimes({1: 1.0}, {1: {1: 2.0, 2: 1.0}}, {}, {}).reading(1, 3)) == [0, 2, 2, 2]


@dataclass
class KnownStop:
    """A row whose tokens are accepted with known probabilities, each given those before it."""

    odds: Sequence[float]
    drafted: int = 0
    max_drafted: int = 5
    asleep: bool = False

    def first(self, mean: float) -> float:
        return self.odds[0]

    def next(self, mean: float) -> float:
        return math.prod(self.odds[: self.drafted + 1])


def rate(times: BatchTimes, rows: Sequence[KnownStop], lengths: Sequence[int]) -> float:
    """Expected tokens by second of a round with drafts of these lengths."""
    tokens = sum(1 + sum(math.prod(row.odds[: i + 1]) for i in range(n)) for row, n in zip(rows, lengths, strict=True))
    seconds = between(times.plain, len(rows))
    unequal = times.unevenly(len(rows)) if len(set(lengths)) > 1 else 1.0
    seconds += times.reading(len(rows), sum(lengths))[sum(lengths)] * unequal
    for i in range(max(lengths)):
        drafting = sum(n > i for n in lengths)
        seconds += times.drafting("first" if i == 0 else "step", len(rows))[drafting]
    return tokens / seconds


def shared(budget: SharedBudget, rows: Sequence[KnownStop]) -> list[int]:
    """The lengths that a round's drafts get."""
    for row in rows:
        row.drafted = 0
    going = list(budget.start(range(len(rows)), rows))
    while going:
        for row in going:
            rows[row].drafted += 1
        going = [row for row in going if rows[row].drafted < len(rows[row].odds)]
        going = list(budget.share(going, rows)) if going else []
    return [row.drafted for row in rows]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_shared_comes_near_the_best_of_all_ways(seed):
    """Rows whose odds are known and the same in every round, so that the best lengths are found by trying all."""
    rng = random.Random(seed)
    dear = rng.choice((0.3, 1.0, 3.0))
    times = BatchTimes(
        plain={1: 3.0, 4: 3.0 + 6 * rng.random()},
        read={1: {4: dear}, 4: {1: dear, 4: dear * (4 + 8 * rng.random())}},
        first={1: {1: 1.0}, 4: {1: 1.2 * dear, 4: 2.0 * dear}},
        step={1: {1: 0.4}, 4: {1: 0.5 * dear, 4: 1.1 * dear}},
        uneven={1: 1.0, 4: rng.choice((1.0, 1.2, 1.5))},
    )
    rows = [KnownStop([rng.uniform(0.2, 1.0) for _ in range(5)]) for _ in range(4)]
    budget, made = SharedBudget(times), list[float]()
    for number in range(400):
        lengths = shared(budget, rows)
        if number >= 300:
            made.append(rate(times, rows, lengths))
        accepted = [
            next((i for i in range(n) if rng.random() > row.odds[i]), n) for row, n in zip(rows, lengths, strict=True)
        ]
        budget.observe(list(zip(lengths, accepted, strict=True)))
    ways = list(itertools.product(range(6), repeat=4))
    best = max(rate(times, rows, way) for way in ways)
    fixed = max(rate(times, rows, [n] * 4) for n in range(6))
    assert sum(made) / len(made) > 0.96 * best
    assert sum(made) / len(made) > 0.99 * fixed


@pytest.mark.parametrize("seed", range(6))
def test_many_rows_draft_alike_what_is_best_for_all(seed):
    """Against every single length, for rows of unlike odds."""
    rng = random.Random(seed)
    dear = rng.choice((0.2, 1.0, 4.0, 12.0))
    times = BatchTimes(
        plain={1: 3.0, 8: 9.0},
        read={1: {4: dear}, 8: {1: dear, 4: dear * (3 + rng.random())}},
        first={1: {1: 1.0}, 8: {1: 0.5, 8: 1.0 + rng.random()}},
        step={1: {1: 0.4}, 8: {1: 0.2, 8: 0.6 + rng.random()}},
        uneven={1: 1.0, 8: 1.3},
    )
    rows = [KnownStop([rng.uniform(0.3, 1.0)] * 5) for _ in range(8)]
    budget, made = SharedBudget(times), list[float]()
    for number in range(300):
        budget_rows = shared(budget, rows)
        assert len(set(budget_rows)) == 1 and all(row.asleep for row in rows)
        if number >= 200:
            made.append(rate(times, rows, budget_rows))
        accepted = [
            next((i for i in range(n) if rng.random() > row.odds[i]), n)
            for row, n in zip(rows, budget_rows, strict=True)
        ]
        budget.observe(list(zip(budget_rows, accepted, strict=True)))
    assert sum(made) / len(made) > 0.99 * max(rate(times, rows, [n] * 8) for n in range(6))
    again = SharedBudget(times)
    again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert again.state_dict() == budget.state_dict()
    assert shared(again, rows) == shared(budget, rows)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_row_emits_the_targets_distribution_whatever_the_other_takes(temperature):
    """All branches of a row beside another one, whose tokens say how much there is left."""
    target, params = TableLM(1), SamplingParams(temperature, top_k=2)
    oracle, lengths = target_distribution(target, params, 3), set[int]()
    for seed in (1, 2, 5):
        found: dict[tuple[int, ...], float] = defaultdict(float)
        for (tokens, drafted), weight in enumerate_branches(partial(beside, target, params, seed)):
            found[tokens] += weight
            lengths.add(drafted)
        assert total_variation(found, oracle) < 1e-10
    assert len(lengths) > 2, "how much is drafted depends on what was drawn"


def beside(target: TableLM, params: SamplingParams, seed: int, branches: Branches) -> tuple[tuple[int, ...], int]:
    """The first tokens of one of two rows, and how many were drafted in its first round."""
    stops = [SharedStop(OnlinePredictor(), 3) for _ in range(2)]
    drafter, rounds = DraftModelDrafter(TableLM(107), stops, 32), list[Round]()
    drafter.budget = SharedBudget(replace(TIMES, plain={1: 6.0, 4: 12.0}))
    sources = [branches, TorchSource(seed)]
    made = generate(target, drafter, [PROMPT, [1, 2, 3]], params, 5, sources, (), Setup(rounds.append))
    first = next(one for one in rounds[2:] if one.row == 0)  # behind what the prompts gave
    return tuple(made[0].tokens[:3]), len(first.tree.tokens)


def test_what_did_not_pay_is_tried_again_and_found_out():
    """A text whose tokens are all rejected, and then all accepted."""
    rows = [KnownStop([0.9] * 5) for _ in range(4)]
    cheap = replace(TIMES, read={1: {4: 0.5}, 4: {4: 2.0}}, step={1: {1: 0.2}, 4: {1: 0.2, 4: 0.4}})
    budget = SharedBudget(cheap)
    for accepted in (0, 5):
        for row in rows:
            row.odds = [0.02 if accepted == 0 else 0.95] * 5
        made = []
        for _ in range(4 * SharedBudget.EXPLORED):
            lengths = shared(budget, [KnownFirst(row.odds) for row in rows])
            budget.observe([(length, min(length, accepted)) for length in lengths])
            made.append(sum(lengths))
        assert sum(made[-50:]) == (0 if accepted == 0 else 50 * 4 * 5)


class KnownFirst(KnownStop):
    """A row of which nothing is known but what was learned of all rows."""

    def first(self, mean: float) -> float:
        return mean
