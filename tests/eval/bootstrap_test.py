"""The bootstrap against what resampling whole owners must give."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.eval.bench.results import Resamples


def test_values_of_one_owner_are_drawn_together():
    drawn = Resamples(["a", "a", "b"], seed=0)
    ones, twos = drawn.sums([1, 1, 0]), drawn.sums([0, 0, 1])
    assert set(zip(ones, twos, strict=True)) == {(4.0, 0.0), (2.0, 1.0), (0.0, 2.0)}


def test_sums_of_the_same_resamples_belong_together():
    drawn = Resamples(range(5), seed=1)
    values = np.arange(1.0, 6.0)
    np.testing.assert_allclose(drawn.sums(2 * values) / drawn.sums(values), 2)


def mean_interval(values, owners):
    drawn = Resamples(owners, seed=0)
    return drawn.interval(drawn.sums(values) / drawn.sums(np.ones(len(values))))


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    """1.96 standard errors; 200 values, so within a tenth."""
    values = np.random.default_rng(0).normal(size=200)
    half = 1.96 * values.std() / 200**0.5
    expected = (values.mean() - half, values.mean() + half)
    assert mean_interval(values, range(200)) == pytest.approx(expected, abs=0.1 * half + 0.01)
    assert mean_interval([1.0, 1.0], ["a", "a"]) is None  # one owner has none
