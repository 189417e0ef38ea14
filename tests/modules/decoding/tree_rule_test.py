"""Number of nodes of a tree against all numbers and arithmetic by hand."""

from __future__ import annotations

import math
import random

import pytest

from draftsmith.modules.decoding.tree_rule import TreeRule, TreeTimes

TIMES = TreeTimes(first=1.0, step=0.5, verify=tuple(10 + 0.5 * nodes for nodes in range(129)))


def test_a_node_that_exactly_pays_is_left_out():
    """At a pace of half a token a probability of one half exactly pays for a unit of time."""
    rule = TreeRule(TreeTimes(first=1.0, step=1.0, verify=(1.0, 2.0, 3.0, 3.0)), any_depth=True)
    assert rule.pace == 0.5
    assert rule.choose([0.0, math.log(0.5)]) == 1
    assert rule.choose([0.0, math.log(0.5), -math.inf]) == 1
    assert rule.choose([0.0, math.log(0.51)]) == 2
    assert rule.choose([0.0, math.log(0.51), -math.inf]) == 2
    # One level in two is accepted: an expected node is half a token, and a level takes one unit.
    assert not rule.deeper(lambda: [0.0])
    assert not rule.deeper(lambda: [math.log(0.5), math.log(0.5)])
    assert rule.deeper(lambda: [math.log(0.51), math.log(0.5)])


def test_only_chosen_nodes_count_as_expected():
    rule = TreeRule(TIMES)
    taken = rule.choose([math.log(p) for p in (0.9, 0.5, 0.08, 0.05, 0.04)])
    rule.observe(taken, draft_calls=2, num_accepted=1)
    kept = 1 - 1 / 500
    assert taken == 3
    assert rule.trust == pytest.approx((3 * kept + 1) / (3 * kept + 0.9 + 0.5 + 0.08))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_number_of_nodes_is_chosen_on_a_stepped_curve(seed):
    draws = random.Random(seed)
    verify = [10.0]
    for _ in range(40):
        verify.append(verify[-1] + draws.choice([0.0, 0.0, 0.1, 3.0]))
    rule = TreeRule(TreeTimes(1.0, 1.0, tuple(verify)))
    values = sorted((math.log(draws.random()) for _ in range(30)), reverse=True)
    worth = [sum(map(math.exp, values[:n])) - rule.pace * verify[n] for n in range(1, 31)]
    assert worth[rule.choose(values) - 1] == pytest.approx(max(worth))


def test_in_the_long_run_it_matches_the_best_pair_of_numbers():
    """Rounds of two kinds alternate; accepted tokens are as expected."""
    kinds = [[0.9**n for n in range(1, 40)], [0.4**n for n in range(1, 40)]]
    times = TreeTimes(2.0, 1.0, tuple(10 + 0.4 * n for n in range(40)))

    def speed(*nodes: int) -> float:
        tokens = sum(1 + sum(kind[:n]) for kind, n in zip(kinds, nodes, strict=True))
        return tokens / sum(times.draft(5) + times.verify[n] for n in nodes)

    best = max(speed(a, b) for a in range(1, 40) for b in range(1, 40))
    rule = TreeRule(times)
    for _ in range(2000):
        for kind in kinds:
            count = rule.choose([math.log(p) for p in kind])
            rule.observe(count, 5, sum(kind[:count]))
    chosen = [rule.choose([math.log(p) for p in kind]) for kind in kinds]
    assert speed(*chosen) == pytest.approx(best, rel=1e-3)
    assert chosen[0] > chosen[1]


def test_another_level_is_drafted_if_it_is_expected_to_pay():
    fixed, free = TreeRule(TIMES), TreeRule(TIMES, any_depth=True)
    for rule in (fixed, free):
        chosen = rule.choose([math.log(p) for p in (1.0, 0.8, 0.4)])
        rule.observe(chosen, draft_calls=4, num_accepted=2)  # two levels accepted, the third not
    assert chosen == 3
    kept = 1 - 1 / 500
    acceptance, trust = (0.5 * kept + 2) / (kept + 3), (3 * kept + 2) / (3 * kept + 2.2)
    enough = free.pace * TIMES.step / acceptance / trust
    for share, deeper in ((1.01, True), (0.99, False)):
        frontier = [math.log(share * enough * part) for part in (0.7, 0.2, 0.1)]
        assert free.deeper(lambda frontier=frontier: frontier) == deeper
        assert fixed.deeper(lambda frontier=frontier: frontier)
