"""Learned state of every method: restored before repeated work, kept apart for every temperature, saved as JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from worlds import STEADY_METHODS, every_head, run_models, varied_acceptance_head

from draftsmith.eval.bench.measuring import measure_prompt
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import EngineRunner, make_runners
from draftsmith.modules.acceptance.online import OnlineLogistic
from draftsmith.modules.decoding.stop import (
    RecentRatio,
    learned_state,
    learners_of,
    load_learned_state,
    snapshot_learned_state,
)
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import known_methods, parse_method, parse_methods
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import SamplingParams

PARAMS, COUNT = SamplingParams(1.0), 24
MODES = [SamplingParams(), PARAMS]
PROMPTS = [BenchPrompt(str(n), [7 + n, 30, 9 * n + 1]) for n in range(3)]
# Every method of this engine, those with more ways to go by several.
LEARNING = ["online:c=0.1:max=5", "cost:c=0.02:max=5"]


@pytest.fixture(scope="module")
def lms(models) -> Models:
    target, draft = load_lm(models["target"]), load_lm(models["draft"])
    torch.manual_seed(0)
    head = varied_acceptance_head(draft.info.hidden_size)
    heads = every_head(target.config, (0, 1))
    heads = {kind: own.eval().requires_grad_(False) for kind, own in heads.items()}
    return run_models(target, draft, draft, **heads, acceptance=head, capacity=300)


def runner(lms: Models, label: str):
    return EngineRunner(lms.target, parse_method(label).build(lms), PARAMS, ())


def answers(made, *numbers: int) -> list:
    """Tokens and rounds of the prompts by number, one after the other."""
    return [made(PROMPTS[n].prompt_ids, COUNT, n) for n in numbers]


def check_nothing_else_lasts(made) -> None:
    """Decode the same answer again after restoring the learned state: nothing else may last."""
    restore = snapshot_learned_state(made)
    fresh = answers(made, 1)
    answers(made, 0, 2, 0)
    restore()
    assert answers(made, 1) == fresh


def test_every_method_is_looked_at():
    assert {label.partition(":")[0] for label in [*LEARNING, *STEADY_METHODS]} == set(known_methods())


@pytest.mark.parametrize("label", [*LEARNING, *STEADY_METHODS])
def test_all_state_that_outlives_an_answer_is_listed(lms, label):
    made = runner(lms, label)
    check_nothing_else_lasts(made)
    assert bool(learners_of(made)) == (label in LEARNING)


@pytest.mark.parametrize("label", LEARNING)
def test_temperatures_share_a_drafter_only_where_nothing_is_learned(lms, label):
    found = make_runners(parse_methods(label), lms, MODES)
    greedy, sampling = found[0.0][label], found[1.0][label]
    before = learned_state(sampling)
    greedy(PROMPTS[0].prompt_ids, COUNT, 0)
    assert learned_state(sampling) == before != learned_state(greedy)
    first, second = make_runners(parse_methods("spec:k=3"), lms, MODES).values()
    assert first["spec:k=3"].drafter is second["spec:k=3"].drafter


@pytest.mark.parametrize("label", LEARNING)
def test_what_was_learned_survives_as_json(lms, label):
    made, other = runner(lms, label), runner(lms, label)
    answers(made, 0, 2)
    load_learned_state(other, json.loads(json.dumps(learned_state(made))))
    assert learned_state(other) == learned_state(made) != learned_state(runner(lms, label))
    assert answers(other, 1) == answers(made, 1)


def test_repeats_do_not_add_to_what_is_learned(lms):
    once, thrice = (runner(lms, LEARNING[0]) for _ in range(2))
    for number, prompt in enumerate(PROMPTS):
        found = [
            measure_prompt({"online": made}, prompt, number, 1.0, COUNT, repeats, number)[0]
            for made, repeats in ((once, 1), (thrice, 3))
        ]
        assert all(found[0][name] == found[1][name] for name in ("token_ids", "rounds"))
    assert learned_state(once) == learned_state(thrice)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_is_learned_from_what_is_no_number(bad):
    """One such round would never be forgotten."""
    ratio, model = RecentRatio(1.0, 2.0), OnlineLogistic(2)
    before = [ratio.state_dict(), model.state_dict()]
    ratio.add(bad, 1.0)
    model.observe([(bad, 0.5), (0.5, bad)], 1)
    assert [ratio.state_dict(), model.state_dict()] == before
