"""Which number of drafted tokens is best where: a table by hand, all choices one by one, and what must never fall."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftsmith.eval.schedule.choice import best_lengths, best_single, choose, paces, ranges
from draftsmith.eval.schedule.costs import RoundTimes
from draftsmith.eval.schedule.rounds import RoundCounts


def times_of(plain, per_token, per_draft=0.0, sizes=(1, 2, 4, 8, 16), most=5) -> RoundTimes:
    """Rounds that take `plain`, `per_draft` for each drafted token, and `per_token` for each that is read."""
    seconds = {size: {k: plain + k * per_draft + size * (k + 1) * per_token for k in range(most + 1)} for size in sizes}
    return RoundTimes(seconds, "by hand")


def counts_of(tau, prompts=30, seed=0) -> RoundCounts:
    """Answers of 60 tokens whose rounds are those of tau, and a little noise between prompts."""
    noise = np.random.default_rng(seed).normal(1, 0.1, (prompts, 1))
    rounds = 60 / np.array(tau)[None] * np.where(np.arange(len(tau)) > 0, noise, 1.0)
    rounds *= 60 / np.array(tau) / rounds.mean(0)
    return RoundCounts(list(range(prompts)), np.full(prompts, 60.0), rounds)


def test_a_table_whose_answer_is_known():
    """1, 1.5, 1.75 tokens a round, which takes 10 and as much as tokens are read. 2 drafted ones beat 1 while
    1.75 / 1.5 > (10 + 3 B) / (10 + 2 B), for B < 2.5; 1 than none while 1.5 > (10 + 2 B) / (10 + B), for B < 10."""
    times = RoundTimes({1: {0: 11, 1: 12, 2: 13}, 16: {0: 26, 1: 42, 2: 58}}, "by hand")
    found = choose(0.0, counts_of([1, 1.5, 1.75]), times, 0)
    assert found.ranges == [(1, 2, 2), (3, 9, 1), (10, 16, 0)]
    assert found.advice.startswith("Do not speculate above 9 requests at once. More than 2 tokens may pay")
    assert found.rows[0]["over_none"] == pytest.approx(1.75 / 13 * 11 - 1)
    assert found.rows[1]["over_none"] == 0 and found.rows[1]["k"] == 0
    # Of at least 1 token: 1 wherever none is best, which costs most at 16 requests.
    assert found.drafting_ranges == [(1, 2, 2), (3, 16, 1)] and found.loss == pytest.approx(1 - 1.5 / 42 * 26)
    # Over both sizes: K = 1 gives 1.375 and 0.929, K = 2 1.481 and 0.785 of the pace without drafts.
    assert found.single == 1
    assert found.rows[0]["over_single"] == pytest.approx(1.75 / 13 / (1.5 / 12) - 1)
    gain = (1.75 / 13 / (1.5 / 12) * 42 / 26 / 1.5) ** 0.5 - 1
    assert found.over_single[0] == pytest.approx(gain)
    low, high = found.over_single[1]
    assert low < gain < high


def test_every_choice_is_the_best_of_all():
    random = np.random.default_rng(3)
    for _ in range(20):
        tau = np.cumsum([1, *np.sort(random.uniform(0, 1, 5))[::-1]])
        seconds = {size: dict(enumerate(np.cumsum(random.uniform(0.1, 1, 6)) + 3)) for size in (1, 3, 8)}
        times = RoundTimes(seconds, "random")
        found = choose(0.0, counts_of(tau), times, 0)
        for size, k in enumerate(found.lengths, start=1):
            speeds = [tau[own] / times.of(size, own) for own in range(6)]
            assert speeds[k] == pytest.approx(max(speeds))
            assert speeds[found.drafting[size - 1]] == pytest.approx(max(speeds[1:]))
        assert found.over_single[0] >= -1e-12
        # No schedule of the timed sizes has a higher mean, and no single K than the one that is named.
        pace = np.array([[tau[own] / times.of(size, own) for own in range(6)] for size in seconds])
        of_all = max(np.log(pace[range(3), list(own)]).mean() for own in itertools.product(range(6), repeat=3))
        own = [found.lengths[size - 1] for size in seconds]
        assert np.log(pace[range(3), own]).mean() == pytest.approx(of_all)
        assert np.log(pace).mean(0).argmax() == found.single


def test_where_more_requests_pay_more_for_a_token_fewer_are_drafted():
    found = choose(0.0, counts_of(np.cumsum([1, 0.8, 0.6, 0.4, 0.2, 0.1])), times_of(10, 0.8), 0)
    assert list(found.lengths) == sorted(found.lengths, reverse=True)
    assert found.lengths[0] > found.lengths[-1] and found.lengths[0] < found.most_drafted == 5
    assert found.advice == "Speculating pays up to 16 requests at once, as far as was timed."


def test_free_drafts_are_as_long_as_can_be_and_useless_ones_are_not_made():
    rising = [1, 1.5, 1.8, 1.9]
    free = choose(0.0, counts_of(rising), times_of(10, 0.0), 0)
    assert free.ranges == [(1, 16, 3)] and "pays up to 16 requests" in free.advice
    assert free.rows[0]["over_single"] == 0 and free.rows[0]["over_single_ci95"] == [0, 0]
    dear = choose(0.0, counts_of(rising), times_of(10, 0.0, per_draft=9), 0)
    assert dear.ranges == [(1, 16, 0)] and dear.last == 0
    assert dear.advice == "Do not speculate: it pays at no number of requests up to 16."


def test_no_more_is_drafted_than_was_timed():
    pace = paces(np.arange(1.0, 9.0), times_of(10, 0.0, most=4))
    assert pace.shape == (16, 5) and best_lengths(pace)[0] == 4


def test_equal_ones_are_the_shortest_and_ranges_cover_every_number():
    assert best_lengths(np.array([[1.0, 2.0, 2.0], [3.0, 3.0, 1.0]])) == [1, 0]
    assert best_lengths(np.array([[1.0, 2.0, 3.0]]), most=1) == [1]
    assert best_single(np.array([[1.0, 2.0], [9.0, 1.0], [1.0, 1.0]]), [1, 3]) == 1
    assert ranges([3, 3, 1, 3]) == [(1, 2, 3), (3, 3, 1), (4, 4, 3)]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Answers are drawn anew; the gain at the K that is true is known."""
    tau, times = np.array([1, 1.5, 1.75]), times_of(10, 0.2, sizes=(1, 8), most=2)
    held = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        rounds = 60 / tau * np.array([[1.0, *([factor] * 2)] for factor in random.normal(1, 0.1, 40)])
        found = choose(0.0, RoundCounts(list(range(40)), np.full(40, 60.0), rounds), times, seed)
        k = found.lengths[0]
        low, high = found.rows[0]["over_none_ci95"]
        held.append(low <= tau[k] * times.of(1, 0) / times.of(1, k) - 1 <= high)
    assert sum(held) >= 52  # of 60 at 95 %: fewer have a probability of 0.005
