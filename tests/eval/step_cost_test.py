"""c against a clock that the test winds: a forward of each model takes what the test says."""

from __future__ import annotations

import pytest

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.costs import MeasuredTimes, measure_step_cost, step_cost_ratio
from draftsmith.modules.drafters.methods import Models, parse_method


class Wound:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A session whose calls take a fixed time and some more for every row."""

    def __init__(self, session, clock: Wound, call_s: float, row_s: float):
        self._session, self._clock, self._call_s, self._row_s = session, clock, call_s, row_s

    def __getattr__(self, name: str):
        return getattr(self._session, name)

    @property
    def length(self) -> int:
        return self._session.length

    def extend(self, tokens, *args, **kwargs):
        rows = tokens.shape[1] if hasattr(tokens, "shape") else max(map(len, tokens))
        self._clock.now += self._call_s + self._row_s * rows
        return self._session.extend(tokens, *args, **kwargs)

    def step(self, tokens):
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]


def slow_lm(path: str, clock: Wound, call_s: float, row_s: float = 0.0):
    lm = load_lm(path)
    make = lm.session
    lm.session = lambda *args, **how: Slow(make(*args, **how), clock, call_s, row_s)
    return lm


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("slowness", [1e-3, 1.0])
def test_c_is_a_draft_step_and_a_row_by_a_round_without_a_draft(models, rows, slowness):
    """A target call takes 10 and 0.5 a row, a draft step 2: c = 2.5 / 10.5, on any scale."""
    clock = Wound()
    target = slow_lm(models["target"], clock, 10 * slowness, 0.5 * slowness)
    own = Models(target, slow_lm(models["draft"], clock, 2 * slowness), capacity=300)
    assert measure_step_cost(own, "draft", rows, clock) == pytest.approx(2.5 / 10.5, rel=1e-6)


def test_the_line_through_two_lengths():
    assert step_cost_ratio((1.0, 13.0), (5.0, 21.0)) == pytest.approx(2 / 11)
    assert (
        0 < step_cost_ratio((1.0, 13.0), (5.0, 12.0)) < 0.01
    )  # noise: a token that costs less than nothing is taken as cheap


def test_it_is_measured_once_a_run_and_said(models, capsys):
    own = Models(load_lm(models["target"]), load_lm(models["draft"]), capacity=300, times=MeasuredTimes())
    first = own.times.step_cost(own, "draft")
    assert 0 < first < 10
    assert capsys.readouterr().err == (
        f"draftsmith: c = {first:.3f}: a drafted token's time in rounds without a draft, measured here (draft)\n"
    )
    parse_method("online").build(own)
    assert own.times.step_costs == {"draft": first} and capsys.readouterr().err == ""
    (given,) = parse_method("online:c=0.25").policies(own, 1)
    assert given.rule.c == 0.25
