"""What a round of a tree takes, from curves by hand and on a small model."""

from __future__ import annotations

import pytest
from run_models import run_models
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.cost.auto import MeasuredTimes, times_of
from draftsmith.eval.cost.clock import clock_of
from draftsmith.eval.cost.machine import DraftCost, measure_costs, straight
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.types import SamplingParams


def test_the_rows_of_a_call_are_the_nodes_and_the_root_and_no_more_rows_take_less():
    times = times_of({1: 4.0, 3: 8.0, 4: 7.0, 6: 13.0}, DraftCost(9.0, 2.0, 0.5), 7)
    assert times.verify == (4, 6, 8, 8, 10, 13, 16, 19)
    assert [times.draft(calls) for calls in (1, 4)] == [2.0, 3.5]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("tiny"))))
    eagle = EagleHead(EagleConfig.for_target(target.config)).eval().requires_grad_(False)
    return run_models(target, eagle=eagle, capacity=400, times=AskedTimes())


class AskedTimes(MeasuredTimes):
    """Keeps what it said last."""

    def tree_times(self, *args):
        self.last = super().tree_times(*args)
        return self.last


def tree_times(models, label):
    """What the rule of such trees goes by."""
    parse_method(label).build(models)
    return models.times.last


def test_a_run_measures_the_target_once_and_every_kind_of_tree_once(models):
    first = tree_times(models, "eagle2:nodes=auto:topk=3")
    known = dict(models.times.seconds)
    assert len(first.verify) == 129 and min(first.verify) > 0 and first.first > 0
    assert tree_times(models, "eagle2:nodes=auto:topk=3:depth=2") == first
    wider = tree_times(models, "eagle2:nodes=auto:topk=4")
    assert wider.verify == first.verify
    assert {key: models.times.seconds[key] for key in known} == known and len(models.times.seconds) == len(known) + 1


@pytest.mark.parametrize("context", [4, 24, 64])
def test_short_contexts_are_measured_as_far_as_they_go(tmp_path, context):
    """Every helper that takes times: of trees, of a drafted token, and of all pieces for the tuner."""
    target = load_lm(str(tiny_llama_dir(tmp_path, max_position_embeddings=context)))
    eagle = EagleHead(EagleConfig.for_target(target.config)).eval().requires_grad_(False)
    models = run_models(target, target, eagle=eagle, capacity=context + 130, times=AskedTimes())
    times = tree_times(models, "eagle2:nodes=auto:topk=3")
    assert len(times.verify) == 129 and min(times.verify) > 0 <= times.step
    assert max(models.times.seconds["target, by rows"]) == (4 if context == 4 else 64)
    assert all(models.times.step_cost(models, drafter, batch) > 0 for drafter in ("draft", "eagle") for batch in (1, 2))
    prompts = [BenchPrompt(str(n), [5] * n) for n in (1, context - 1)]
    probes = {label.partition(":")[0]: [parse_method(label)] for label in ("ar", "spec:k=3")}
    probes["eagle2/3"] = [parse_method("eagle2:topk=3:nodes=9:depth=3")]
    costs = measure_costs(models, prompts, probes, SamplingParams(), 0, clock_of("cpu"))
    assert costs.target_s(1) > 0 and costs.target_s(200, tree=True) > 0
    assert all(cost.first >= 0 and cost.step >= 0 for cost in costs.drafters.values())


def test_one_measured_number_of_rows_holds_for_all():
    assert straight({1: 2.0}, 1) == straight({1: 2.0}, 9) == 2.0


def test_noise_in_the_last_two_numbers_of_rows_does_not_make_many_rows_free():
    assert straight({1: 2.0, 3: 4.0, 4: 1.0}, 200) == 1.0
    assert straight({1: 2.0, 2: 3.0}, 4) == 5.0
