"""Times of batched rounds against a clock that the test winds, and on small models."""

from __future__ import annotations

import json

import pytest
from run_models import run_models
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.cost.auto import MeasuredTimes
from draftsmith.eval.cost.batches import ALIKE, as_json, from_json, measure_batch_times, sizes
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.drafters.methods import Models, parse_method

from .step_cost_test import Wound, slow_lm


def test_sizes_are_powers_of_two_and_the_batch_itself():
    assert [sizes(rows) for rows in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_parts_of_a_round_are_told_apart(models):
    """A target call takes 10 and 0.5 for each token of its longest row, a draft step 2, whatever the rows."""
    clock = Wound()
    own = Models(slow_lm(models["target"], clock, 10, 0.5), slow_lm(models["draft"], clock, 2), capacity=300)
    times = measure_batch_times(own, "draft", 4, clock)
    assert times.plain == pytest.approx({1: 10.5, 2: 10.5, 4: 10.5})
    assert times.first == {1: {1: 2}, 2: {1: 2, 2: 2}, 4: {1: 2, 4: 2}}
    assert times.step == {1: {1: 2}, 2: {1: 2, 2: 2}, 4: {1: 2, 2: 2, 4: 2}}
    assert times.read[1] == pytest.approx({length: 0.5 * length for length in ALIKE})
    assert times.read[4] == pytest.approx({length: 0.5 * length for length in ALIKE})
    # Drafts of 1, 3, 4 and 8 tokens take what the longest takes, and are 4 long on average.
    assert times.uneven[1] == 1 and times.uneven[4] == pytest.approx(2)


@pytest.mark.parametrize("context", [4, 24, 64])
@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_short_contexts_are_measured_as_far_as_they_go(tmp_path, context, drafter):
    target = load_lm(str(tiny_llama_dir(tmp_path, max_position_embeddings=context)))
    eagle = EagleHead(EagleConfig.for_target(target.config)).eval().requires_grad_(False)
    models = run_models(target, target, eagle=eagle, capacity=context + 130)
    times = models.times.batch_times(models, drafter, 3)
    assert min(times.plain.values()) > 0 and sorted(times.read) == [1, 2, 3]
    for rows in (1, 2, 3, 5):
        assert len(times.reading(rows, 40)) > 40 and times.drafting("first", rows)[rows] >= 0


def test_they_are_measured_once_a_run_and_kept_with_it(models, capsys):
    own = Models(load_lm(models["target"]), load_lm(models["draft"]), capacity=300, times=MeasuredTimes())
    parse_method("shared").build(own, 2)
    assert capsys.readouterr().err == "draftsmith: times of rounds measured here (draft, up to 2 rows)\n"
    first = own.times.batch_times(own, "draft", 2)
    again = MeasuredTimes()
    again.load_state_dict(json.loads(json.dumps(own.times.state_dict())))
    assert again.batch_times(own, "draft", 2) == first == from_json(json.loads(json.dumps(as_json(first))))
    assert capsys.readouterr().err == ""
