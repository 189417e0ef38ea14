"""Seconds from a trace and from costs, against arithmetic by hand."""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.eval.cost.machine import (
    DecodingCosts,
    DraftCost,
    Overhead,
    TimedAnswer,
    drafter_of,
    family_of,
    overhead,
)
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.methods import Named, parse_methods

COSTS = DecodingCosts(
    context=100,
    start=5.0,
    target={1: 10.0, 3: 14.0, 5: 30.0},
    tree={1: 10.0, 9: 90.0},
    drafters={"draft": DraftCost(3.0, 2.0, 1.0), "tree/4": DraftCost(0.5, 4.0, 3.0)},
    families={"spec": Overhead(0.25, 0.125)},
)


def one(label: str) -> Named:
    (named,) = parse_methods(label)
    return named


def test_rows_between_the_measured_ones_lie_on_a_line_and_beyond_them_the_last_goes_on():
    assert [COSTS.target_s(rows) for rows in (1, 2, 3, 4, 5, 7)] == [10, 12, 14, 22, 30, 46]
    assert COSTS.target_s(5, tree=True) == 50


def test_seconds_of_chains_add_up():
    trace = DecodeTrace([DecodeStep(2, 1, 2, 2), DecodeStep(4, 4, 5, 4), DecodeStep(0, 0, 1, 0)], prefill_emitted=1)
    draft = 3 + (2 + 1) + (2 + 3 * 1)
    assert COSTS.seconds(trace, one("spec")) == 5 + draft + 14 + 30 + 10 + 3 * 0.25 + 6 * 0.125
    assert COSTS.seconds(trace, one("confidence")) == 5 + draft + 14 + 30 + 10  # nothing is known beyond its forwards


def test_a_trees_levels_are_drafted_and_its_nodes_read_by_a_call_for_trees():
    trace = DecodeTrace([DecodeStep(8, 2, 3, 2)], prefill_emitted=1)
    assert COSTS.seconds(trace, one("eagle2:topk=4")) == 5 + 0.5 + (4 + 3) + 90


def test_families_and_their_drafters():
    labels = "ar,spec:k=3,eagle:k=2,eagle2:nodes=4:topk=8,confidence:t=0.4,self-verify:k=3:drafter=eagle,pld"
    named = parse_methods(labels)
    families = [family_of(item) for item in named]
    assert families == ["ar", "spec", "eagle", "eagle2/8", "confidence", "self-verify/eagle", "pld"]
    drafters = [drafter_of(item.method) for item in named]
    assert drafters == [None, "draft", "eagle", "tree/8", "draft", "eagle", None]


def test_what_is_beyond_the_forwards_is_found_again():
    planted = Overhead(0.5, 0.25)

    def probe(*steps: DecodeStep, family: str = "spec", extra: float = 0.0) -> TimedAnswer:
        trace = DecodeTrace(list(steps), prefill_emitted=1)
        spent = dataclasses.replace(COSTS, families={family: planted}).seconds(trace, one(family))
        return TimedAnswer(family, one(family).method, Generation([0], trace, False), spent - extra)

    bare = DecodingCosts(100, 5.0, COSTS.target, COSTS.tree, COSTS.drafters)
    short, long = [DecodeStep(1, 1, 2, 1)] * 5, [DecodeStep(4, 2, 3, 4)] * 3
    found = overhead([probe(*short), probe(*long)], bare)
    assert (found.round, found.step) == pytest.approx((0.5, 0.25))
    alone = overhead([probe(*[DecodeStep(0, 0, 1, 0)] * 4, family="ar")], bare)
    assert (alone.round, alone.step) == pytest.approx((0.5, 0.0))
    # Noise that makes a step's share negative is not taken for a gain.
    noisy = overhead([probe(*short), probe(*long, extra=4.0)], bare)
    assert noisy.round >= 0 and noisy.step >= 0
