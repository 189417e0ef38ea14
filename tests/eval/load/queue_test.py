"""Times under load against arithmetic and queueing theory, in simulated time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_pool import FakePool, Given, Simulated, simulated

from draftsmith.eval.bootstrap import Resamples
from draftsmith.eval.load.ours import WorkClock
from draftsmith.eval.load.requests import Block, Load, Plan, Poisson, Request
from draftsmith.eval.load.summary import Goals, compared, crossing, equality, paying, summarise

ONE = Load("open", 1.0)


def test_three_requests_to_a_decoder_of_one_row():
    """By hand: 1 s to the first token, then 2 tokens every 0.5 s, answers of 5: 2 s each, one after the other."""
    clock = Simulated()
    block = simulated(FakePool(clock, 1, 1.0, 0.5, each=2), Given([0.0, 1.0, 1.1]), Plan([0, 1, 2], 0, 3), 5)
    assert [request.times for request in block.requests] == [[1, 1.5, 2], [3, 3.5, 4], [5, 5.5, 6]]
    assert [request.counts for request in block.requests] == [[1, 2, 2]] * 3
    assert [request.started for request in block.requests] == [0, 2, 4]
    row = summarise("ar", ONE, [block], Goals(ttft=2.5, tpot=0.25), 0)
    assert [row[f"ttft_{key}"] for key in ("mean", "p50", "p95", "p99")] == pytest.approx([2.3, 2, 3.71, 3.862])
    assert row["tpot_p50"] == row["tpot_p99"] == 0.25
    assert [row[f"e2e_{key}"] for key in ("mean", "p50", "p95")] == pytest.approx([3.3, 3, 4.71])
    assert (row["itl_mean"], row["itl_p99"]) == (0.5, 0.5)
    assert (row["tokens_per_s"], row["requests_per_s"], row["goodput"]) == pytest.approx((2.5, 0.5, 2 / 6))
    assert row["user_tokens_per_s"] == 4.0
    # A prefill is a step of this decoder: of its 9 rounds 6 emitted a token that was drafted.
    assert row["round_tokens"] == pytest.approx(1 + 6 / 9)
    assert summarise("ar", ONE, [block], Goals(tpot=0.2), 0)["goodput"] == 0


def test_a_row_that_is_done_is_followed_at_once():
    """Two rows: while one user has an answer of two tokens after the other, nobody waits."""
    clock = Simulated()
    pool = FakePool(clock, 2, 0.25, 1.0)
    block = simulated(pool, Given([0.0, 0.5, 0.6]), Plan([0], 0, 3), 2)
    # 0: 0-0.25, then a round to 1.25. 1 and 2 have come by then, and there are two places.
    assert [request.times for request in block.requests] == [[0.25, 1.25], [1.5, 2.5], [1.5, 2.5]]
    assert [request.started for request in block.requests] == [0.0, 1.25, 1.25]


@pytest.mark.parametrize(("share", "count"), [(0.5, 20_000), (0.8, 60_000)])
def test_waiting_in_an_open_loop_is_that_of_pollaczek_and_khinchine(share, count):
    """M/D/1: mean wait D rho / (2 (1 - rho)); a share 1 - rho does not wait."""
    clock, service = Simulated(), 2.0
    pool = FakePool(clock, 1, service, 1.0)
    block = simulated(pool, Poisson(share / service, seed=3), Plan([0], 200, count), 1)
    waits = np.array([request.first_token - service for request in block.requests])
    assert waits.mean() == pytest.approx(service * share / (2 * (1 - share)), rel=0.06)
    assert (waits < 1e-9).mean() == pytest.approx(1 - share, abs=0.01)
    row = summarise("ar", Load("open", share / service), [block], Goals(), 0)
    assert row["requests_per_s"] == pytest.approx(share / service, rel=0.03)


def test_a_stall_is_seen_by_all_who_were_to_begin_in_it():
    """Coordinated omission: by the times at which requests were sent, one request would have noticed."""
    clock, length = Simulated(), 10.0
    pool = FakePool(clock, 1, 0.1, 0.1, stall=(50.0, length))
    block = simulated(pool, Poisson(2.0, seed=1), Plan([0], 20, 400), 1)
    during = [request for request in block.requests if 50.2 < request.intended < 60]
    assert len(during) > 10
    for request in during:
        assert request.first_token > 60 - request.intended
    row = summarise("ar", Load("open", 2.0), [block], Goals(), 0)
    assert row["ttft_p99"] > 0.7 * length
    sent = [request.times[0] - request.started for request in block.requests]
    assert np.quantile(sent, 0.99) < 0.2


def test_schedules_are_drawn_beforehand():
    gaps = []
    for told in (False, True):
        arrivals = Poisson(4.0, seed=5)
        times = []
        for number in range(4000):
            times.append(arrivals.take())
            if told:
                arrivals.finished(1000.0 * number)
        gaps.append(np.diff(times))
    assert (gaps[0] == gaps[1]).all()
    assert gaps[0].mean() == pytest.approx(0.25, rel=0.05)
    assert gaps[0].std() == pytest.approx(0.25, rel=0.05)  # as of an exponential distribution
    assert Poisson(4.0, seed=6).next != Poisson(4.0, seed=5).next


@pytest.mark.parametrize("users", [1, 3, 8])
def test_a_closed_loop_is_full_while_requests_count(users):
    clock = Simulated()
    pool = FakePool(clock, users, 0.2, 0.1)
    plan = Plan(list(range(5)), 9, 40)
    block = simulated(pool, Load("closed", users).arrivals(0), plan, 11)
    began = min(request.started for request in block.requests)
    ended = max(request.times[-1] for request in block.requests)
    assert {count for at, count in pool.going if began <= at < ended} == {users}
    assert [request.prompt for request in block.requests] == list(itertools.islice(itertools.cycle(range(5)), 40))
    row = summarise("ar", Load("closed", users), [block], Goals(), 0)
    # All ask and are answered together: 11 tokens of each in 0.2 + 10 * 0.1 seconds.
    assert row["tokens_per_s"] == pytest.approx(users * 11 / 1.2)
    assert row["requests_per_s"] == pytest.approx(users / 1.2)
    # 40 requests are no multiple of 3: there the window has an edge.
    assert row["window_tokens_per_s"] == pytest.approx(users * 11 / 1.2, rel=0.05)
    assert row["user_tokens_per_s"] == pytest.approx(10.0)


def test_littles_law_and_the_window_agree_where_users_are_out_of_step():
    clock, draws = Simulated(), np.random.default_rng(0)
    pool = FakePool(clock, 6, 0.2, 0.1)
    pool.call = lambda seconds, rows, tokens, call=pool.call: call(seconds * draws.exponential(), rows, tokens)  # type: ignore[method-assign]
    block = simulated(pool, Load("closed", 6).arrivals(0), Plan(list(range(7)), 6, 600), 20)
    row = summarise("ar", Load("closed", 6), [block], Goals(), 0)
    assert row["tokens_per_s"] == pytest.approx(row["window_tokens_per_s"], rel=0.01)
    low, high = row["tokens_per_s_ci95"]
    assert low < row["tokens_per_s"] < high


def test_work_clock_skips_what_it_would_wait():
    work = iter([100.0, 101.0, 101.5, 101.5, 103.0])
    clock = WorkClock(lambda: next(work))
    assert clock.now() == 1.0
    clock.wait(5.0)  # from 1.5 on
    assert clock.now() == 5.0
    assert clock.now() == 6.5


def answer(prompt: int, latency: float, tokens: int = 10, ids: tuple[int, ...] = (1,)) -> Request:
    return Request(prompt, prompt, 1.0, 1.0, [1.5, 1.0 + latency], [1, tokens - 1], list(ids))


def test_speed_over_ar_is_paired_by_prompt():
    base = [answer(prompt, 1.0 + prompt) for prompt in range(20)]
    own = [answer(prompt, (1.0 + prompt) / 2) for prompt in range(19)]  # one failed
    row: dict = {}
    compared(row, own, base, 0)
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_ci95"] == pytest.approx([2.0, 2.0])  # whatever is drawn, as prompts are drawn in pairs
    block = Block(own, 10.0, 1.0, 200)
    one, other = (summarise("x", Load("closed", 4), [Block(r, 1, 1, 1)], Goals(), 0) for r in (own, base[:19]))
    assert one["tokens_per_s"] / other["tokens_per_s"] == pytest.approx(2.0)
    assert summarise("x", ONE, [block], Goals(), 0)["tokens_per_cpu_s"] == 200.0


def test_answers_are_compared_with_those_alone():
    alone = {prompt: answer(prompt, 1.0) for prompt in range(3)}
    assert equality([answer(2, 9.0)], alone) == {"matches_ar": True, "num_differing": 0}
    assert equality([answer(0, 1.0, ids=(2,)), answer(1, 1.0)], alone) == {"matches_ar": False, "num_differing": 1}
    assert equality([answer(0, 1.0)], {}) == {}


def test_where_speculation_stops_paying():
    found = crossing([(1, 1.5), (2, 1.2), (4, 0.8), (8, 0.7)])
    assert found["stops_at"] == pytest.approx(2**1.5) and found["between"] == [2, 4]
    assert crossing([(1, 1.2), (4, 1.0)])["stops_at"] is None
    assert crossing([(1, 0.9), (4, 0.8)]) == {"stops_at": 1, "pays": False, "last": 4}
    assert crossing([(1, 0.9), (2, 1.1), (4, 0.9)])["between"] == [2, 4]  # it falls there and stays below
    rows = [
        {"method": method, "load": "closed", "value": value, "speedup": ratio}
        for method, ratio in (("ar", 1.0), ("spec", 1.3))
        for value in (4, 1)
    ]
    (row,) = paying(rows)
    assert (row["method"], row["best"], row["stops_at"], row["last"]) == ("spec", 1.3, None, 4)


def test_quantiles_of_resamples_are_those_of_a_plain_bootstrap():
    draws = np.random.default_rng(1)
    values = draws.exponential(size=60)
    found = np.percentile(Resamples(range(60), 0).quantiles(values, [0.5, 0.95]), [2.5, 97.5], axis=0)
    plain = np.array([np.quantile(draws.choice(values, 60), [0.5, 0.95]) for _ in range(4000)])
    assert found == pytest.approx(np.percentile(plain, [2.5, 97.5], axis=0), rel=0.12)
    owned = Resamples([0] * 30 + [1] * 30, 0).quantiles([1.0] * 30 + [2.0] * 30, [0.5])
    assert set(owned[:, 0]) == {1.0, 1.5, 2.0}  # an owner has all its values or none
