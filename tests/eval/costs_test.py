"""Measured costs: c against a clock that the test winds."""

from __future__ import annotations

import pytest

from draftsmith.eval.costs import measure_step_cost
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.pretrained.models import load_lm


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


def test_c_is_a_draft_step_and_a_row_by_a_round_without_a_draft(models):
    """A target call takes 10 and 0.5 a row, a draft step 2: c = 2.5 / 10.5."""
    clock = Wound()
    target = slow_lm(models["target"], clock, 10, 0.5)
    own = Models(target, slow_lm(models["draft"], clock, 2), capacity=300)
    assert measure_step_cost(own, "draft", clock) == pytest.approx(2.5 / 10.5, rel=1e-6)
