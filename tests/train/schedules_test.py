"""Learning rates against their formulas."""

from __future__ import annotations

import math

import pytest

from draftsmith.train.schedules import lr_schedule


def test_warm_up_rises_linearly_to_the_peak():
    share = lr_schedule("cosine", 100, 0.1, 0.0)
    assert [share(step) for step in range(10)] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert share(10) == 1.0


def test_cosine_is_half_way_in_the_middle_and_ends_at_its_floor():
    share = lr_schedule("cosine", 100, 0.0, 0.1)
    assert (share(0), share(50), share(100)) == pytest.approx((1.0, 0.55, 0.1))
    assert share(25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_linear_and_constant():
    assert lr_schedule("linear", 10, 0.0, 0.0)(4) == pytest.approx(0.6)
    assert lr_schedule("constant", 10, 0.0, 0.0)(9) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_a_run_of_one_step_trains(name):
    assert lr_schedule(name, 1, 0.03, 0.0)(0) == 1.0
