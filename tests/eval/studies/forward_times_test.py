"""The cost model's regression, against times that made the rows, and the front against a check of all pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import PER_PROMPT, row_of, write_rows
from draftsmith.eval.studies.forward_times import (
    ForwardTimes,
    bench_rows,
    explained,
    fit_forward_times,
    gain_interval,
    theory_rows,
)
from draftsmith.eval.studies.specdecpp.sweep import pareto_front
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool


def rows_of(t_draft: float, t_target: float, noise: float = 0.0, method: str = "spec:k=3") -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        drafted, calls = int(rng.integers(10, 200)), int(rng.integers(5, 60))
        seconds = t_draft * drafted + t_target * calls + noise * rng.normal()
        rows.append({
            "method": method, "id": str(number), "tokens": drafted // 2 + calls, "cpu_s": seconds, "wall_s": 9.0,
            "num_draft_tokens": drafted, "num_target_calls": calls,
        })  # fmt: skip
    return rows


def test_the_regression_recovers_the_times_that_made_the_rows():
    times = fit_forward_times(rows_of(0.002, 0.017), "cpu")
    assert (times.t_draft, times.t_target, times.r2) == pytest.approx((0.002, 0.017, 1.0))
    assert times.rows == 40


def test_r2_is_the_share_of_the_variance_that_is_explained():
    rows = rows_of(0.002, 0.017, noise=0.05)
    times = fit_forward_times(rows, "cpu")
    seconds = np.array([row["cpu_s"] for row in rows])
    predicted = np.array([times.seconds(row["num_draft_tokens"], row["num_target_calls"]) for row in rows])
    assert 0.5 < times.r2 < 1
    assert times.r2 == pytest.approx(1 - np.var(seconds - predicted) / np.var(seconds), abs=0.01)
    assert explained(rows, ForwardTimes(0.0, 0.0, 0.0, 0), "cpu") < 0  # worse than the mean


def test_theory_and_measurement_are_ratios_of_sums_by_method():
    slow, fast = rows_of(0.002, 0.02), rows_of(0.001, 0.01, method="spec:k=5")
    found = {row["method"]: row for row in theory_rows([*slow, *fast], fit_forward_times(slow, "cpu"), "cpu")}
    tokens, seconds = sum(row["tokens"] for row in slow), sum(row["cpu_s"] for row in slow)
    assert found["spec:k=3"]["measured"] == pytest.approx(tokens / seconds)
    assert found["spec:k=3"]["difference"] == pytest.approx(0, abs=1e-9)
    assert found["spec:k=5"]["difference"] == pytest.approx(-0.5)  # twice as fast as the other method's times say


def test_throughput_of_the_cost_model():
    trace = DecodeTrace([DecodeStep(4, 3, 4, 4), DecodeStep(4, 0, 1, 4)], prefill_emitted=1)
    assert ForwardTimes(0.5, 2.0, 1.0, 1).tokens_per_s(pool([trace])) == 6 / (0.5 * 8 + 2.0 * 3)


def test_gains_are_resampled_in_pairs():
    """A method that takes exactly 0.8 of the other's time on every prompt gains 25 % in every resample."""
    slow = rows_of(0.002, 0.02)
    fast = [{**row, "method": "spec:k=5", "cpu_s": 0.8 * row["cpu_s"]} for row in slow]
    assert gain_interval([*slow, *fast], "spec:k=5", "spec:k=3", "cpu", 0) == pytest.approx([0.25, 0.25])
    assert gain_interval([slow[0], fast[0]], "spec:k=5", "spec:k=3", "cpu", 0) is None


def test_rows_of_a_bench_without_prompts_that_failed(tmp_path):
    prompts = [BenchPrompt("1", [5, 6]), BenchPrompt("2", [7])]
    made = Generation([8], DecodeTrace(prefill_emitted=1), True)
    rows = [row_of(prompts[0], 0, "ar", 0.0, made, [0.1], [0.1]), row_of(prompts[1], 1, "ar", 0.0, error="too long")]
    write_rows(tmp_path / PER_PROMPT, rows)
    assert [row["id"] for row in bench_rows(tmp_path)] == ["1"]


def test_the_front_by_hand():
    points = [(0.5, 0.2), (0.1, 0.9), (0.3, 0.3), (0.4, 0.3), (0.6, 0.2), (0.1, 0.95), (0.3, 0.3)]
    assert pareto_front(points) == [1, 2, 0]


def test_the_front_holds_what_no_other_point_beats():
    rng = random.Random(0)
    for _ in range(50):
        points = [(rng.randrange(6), rng.randrange(6)) for _ in range(12)]
        best = {p for p in points if not any(o[0] <= p[0] and o[1] <= p[1] and o != p for o in points)}
        assert {points[i] for i in pareto_front(points)} == best
