"""Least squares against the seconds that made the measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftsmith.eval.studies.fit import LinearCost, explained, least_squares

COUNTS = [[1, 0], [4, 2], [2, 5], [7, 1]]


def seconds_of(cost: LinearCost) -> list[float]:
    return [cost.seconds(*row) for row in COUNTS]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("fixed", [0.0, 3.0])
def test_what_made_the_seconds_is_found_again(fixed, relative):
    planted = LinearCost((0.5, 2.0), fixed)
    found = least_squares(COUNTS, seconds_of(planted), fixed=fixed > 0, relative=relative)
    assert (*found.weights, found.fixed, found.r2) == pytest.approx((0.5, 2.0, fixed, 1.0))


def test_relative_errors_weigh_small_measurements_as_much_as_large_ones():
    """Two measurements of one count contradict each other: 1 s for 1, and 20 s for 10."""
    absolute, relative = least_squares([[1], [10]], [1, 20]), least_squares([[1], [10]], [1, 20], relative=True)
    assert absolute.weights[0] == pytest.approx(201 / 101)
    assert relative.weights[0] == pytest.approx(1.5 / 1.25)  # the least of (w - 1)^2 + (w / 2 - 1)^2


def test_r2_is_of_the_variance_and_not_defined_without_one():
    seconds = np.array([1.0, 2.0, 4.0])
    assert explained(LinearCost((0.0,), float(seconds.mean())), [[1], [2], [3]], seconds) == pytest.approx(0)
    assert explained(LinearCost((1.0,)), [[1], [2], [3]], seconds) == pytest.approx(1 - 1 / (14 / 3))
    assert math.isnan(least_squares([[1], [1]], [2, 2]).r2)
