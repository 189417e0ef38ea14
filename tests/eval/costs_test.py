"""Measured costs: c against a clock that the test winds, times of trees from curves by hand and on a small model."""

from __future__ import annotations

import pytest
from worlds import run_models, tiny_llama_dir

from draftsmith.eval.costs import MeasuredTimes, interpolate, measure_step_cost
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
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


def test_the_rows_of_a_call_are_the_nodes_and_the_root_and_no_more_rows_take_less():
    times = MeasuredTimes()
    curve = {"1": 4.0, "3": 8.0, "4": 7.0, "6": 13.0}
    times.load_state_dict({"tree_times": {"target, by rows": curve, "trees": {"first": 2.0, "step": 0.5}}})
    found = times.tree_times(Models(None), "trees", None)
    assert found.verify[:8] == (4, 6, 8, 8, 10, 13, 16, 19)
    assert [found.draft(calls) for calls in (1, 4)] == [2.0, 3.5]


class KeepsLast(MeasuredTimes):
    def tree_times(self, *args):
        self.last = super().tree_times(*args)
        return self.last


def models_of(path, **shape):
    target = load_lm(str(tiny_llama_dir(path, **shape)))
    eagle = EagleHead(EagleConfig.for_target(target.config)).eval().requires_grad_(False)
    capacity = target.info.max_position + 130
    return run_models(target, target, eagle=eagle, capacity=capacity, times=KeepsLast())


def tree_times(models, label):
    """The times that the rule of such trees uses."""
    parse_method(label).build(models)
    return models.times.last


def test_a_run_measures_the_target_once_and_every_kind_of_tree_once(tmp_path):
    models = models_of(tmp_path)
    first = tree_times(models, "eagle-tree:nodes=auto:topk=3")
    known = dict(models.times.tree_seconds)
    assert len(first.verify) == 129 and min(first.verify) > 0 and first.first > 0
    assert tree_times(models, "eagle-tree:nodes=auto:topk=3:depth=2") == first
    wider = tree_times(models, "eagle-tree:nodes=auto:topk=4")
    assert wider.verify == first.verify
    now = models.times.tree_seconds
    assert {key: now[key] for key in known} == known and len(now) == len(known) + 1


def test_a_curve_goes_on_straight_and_never_down():
    assert interpolate({1: 2.0}, 1) == interpolate({1: 2.0}, 9) == 2.0
    assert [interpolate({1: 10.0, 3: 14.0, 5: 30.0}, rows) for rows in (1, 2, 3, 4, 5, 7)] == [10, 12, 14, 22, 30, 46]
    assert interpolate({1: 2.0, 3: 4.0, 4: 1.0}, 200) == 1.0  # noise in the last two does not make many rows free
