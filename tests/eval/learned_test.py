"""A run that is repeated finds its policies as they were, so that its medians are of the same work."""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.data.models import load_lm
from draftsmith.eval.learned import policies_of, remember
from draftsmith.eval.measure import BatchRunner, BenchPrompt, EngineRunner, OneByOne, measure
from draftsmith.eval.methods import parse_method
from draftsmith.eval.methods.base import Models
from draftsmith.modules.heads.eagle import EagleConfig, EagleHead
from draftsmith.modules.types import SamplingParams

PARAMS, COUNT = SamplingParams(1.0), 24
GROUPS = [[BenchPrompt(str(n), [7 + n, 30, 9 * n + 1])] for n in range(3)]


@pytest.fixture(scope="module")
def lms(models) -> Models:
    return Models(load_lm(models["target"]), load_lm(models["draft"]), capacity=300)


def runner(models: Models, label: str, batch: bool = False):
    method = parse_method(label)
    if batch:
        session = models.target.rows_session(1, models.capacity)
        return BatchRunner(models.target, session, method.build_batch(models, 1), PARAMS, ())
    return OneByOne(EngineRunner(models.target, method.build(models), PARAMS, ()))


def numbers(made) -> list[list[float]]:
    """Of the rules and of the logistic fits."""
    rules = [[stop.rule.pace, stop.rule.acceptance] for stop in policies_of(made)]
    return rules + [list(stop.judge.model.weights) for stop in policies_of(made)]


@pytest.mark.parametrize("batch", [False, True])
def test_what_is_remembered_is_put_back_and_the_same_work_done(lms, batch):
    made = runner(lms, "online:c=0.1:max=5", batch)
    made([GROUPS[0][0].prompt_ids], COUNT, [0])
    before, restore = numbers(made), remember(made)
    first = made([GROUPS[1][0].prompt_ids], COUNT, [1])
    after = numbers(made)
    restore()
    assert numbers(made) == before != after
    assert made([GROUPS[1][0].prompt_ids], COUNT, [1]) == first and numbers(made) == after


def test_repeats_teach_nothing_more(lms):
    once, thrice = (runner(lms, "online:c=0.1:max=5") for _ in range(2))
    for number, group in enumerate(GROUPS):
        found = [
            measure({"online": made}, group, number, COUNT, repeats, [number])["online"][0]
            for made, repeats in ((once, 1), (thrice, 3))
        ]
        assert found[0].tokens == found[1].tokens and found[0].trace == found[1].trace
    assert numbers(once) == numbers(thrice)


def test_other_policies_have_nothing_to_remember(lms):
    for label in ("ar", "spec:k=2", "self-verify:k=2"):
        remember(runner(lms, label))()
        assert numbers(runner(lms, label)) == []


def test_a_trees_rule_is_put_back_too(lms):
    eagle = EagleHead(EagleConfig.for_target(lms.target.config)).eval().requires_grad_(False)
    trees = dataclasses.replace(lms, eagle=eagle, measured={})
    made = runner(trees, "eagle2:nodes=auto:depth=auto:topk=2")
    rule = made.runner.drafter.rule
    restore, before = remember(made), (rule.pace, rule.trust)
    first, after = made([GROUPS[1][0].prompt_ids], COUNT, [1]), (rule.pace, rule.trust)
    restore()
    assert (rule.pace, rule.trust) == before != after
    assert made([GROUPS[1][0].prompt_ids], COUNT, [1]) == first and (rule.pace, rule.trust) == after
