"""Rules read off rollouts, against lengths worked out by hand: at their thresholds, and one token either side of them.

All numbers are halves and quarters, so that a probability equals a threshold exactly.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_rollouts import hand_rollouts

from draftsmith.eval.replay import replay
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer, TreeRollouts
from draftsmith.modules.acceptance.policies import ThresholdRule
from draftsmith.modules.decoding.stop import SelfVerify

DEPTH = 5
# Survival before tokens 1, 2, ..: 1, 0.75, 0.375, 0.1875, 0.09375; so P(some token before it is rejected) is 0, 0.25,
# 0.625, 0.8125, 0.90625.
PROBS = [0.75, 0.5, 0.5, 0.5, 0.5]


def rows(count: int = 2) -> ChainRollouts:
    return hand_rollouts([[True] * (count + 1)], DEPTH)


@pytest.mark.parametrize(
    ("h", "minimum", "maximum", "length"),
    [
        (0.1, 1, 5, 2), (0.2499, 1, 5, 2), (0.25, 1, 5, 3), (0.5, 1, 5, 3), (0.625, 1, 5, 4), (0.8125, 1, 5, 5),
        (0.95, 1, 5, 5), (0.95, 1, 4, 4), (0.1, 3, 5, 3), (0.1, 1, 1, 1), (0.625, 4, 4, 4), (0.0, 1, 5, 2),
    ],
)  # fmt: skip
def test_a_threshold_is_passed_not_met_and_asks_of_the_tokens_before_the_last(h, minimum, maximum, length):
    rollouts = rows()

    def drafted(late: bool) -> list[int]:
        predictor = replay.KnownPredictor(np.tile(PROBS, (len(rollouts.start), 1)), late)
        (trace,) = replay.replay_by_prediction(rollouts, predictor, ThresholdRule(h), minimum, maximum)
        return [step.num_drafted for step in trace.steps if step.num_drafted]

    assert set(drafted(late=True)) == {length}
    # A head that predicts for the last token too is one token earlier, where the least allows it.
    assert set(drafted(late=False)) == {
        next((n for n in range(minimum, maximum) if 1 - np.prod(PROBS[:n]) > h), maximum)
    }


@pytest.mark.parametrize(
    ("t", "minimum", "maximum", "length"),
    [(0.5, 1, 5, 5), (0.51, 1, 5, 2), (0.75, 1, 5, 2), (0.76, 1, 5, 1), (0.51, 3, 5, 3), (0.1, 1, 4, 4)],
)
def test_a_confidence_that_equals_the_threshold_goes_on(t, minimum, maximum, length):
    rollouts = rows()
    rollouts.log_q[:] = np.log(PROBS)
    assert set(np.exp(rollouts.log_q).flat) == {0.5, 0.75}  # no rounding decides
    assert replay.confidence_lengths(rollouts, t, minimum, maximum).tolist() == [length] * len(rollouts.start)


def test_self_verification_goes_on_at_an_entropy_that_equals_the_mean():
    """Greedy rounds of an answer whose third token is missed: entropy 0.5 nats there becomes the threshold, which is 0
    before; the tokens after it have 0.5, 0.5 and 0.75."""
    rollouts = hand_rollouts([[True, True, False, True, True, True, True, True]], DEPTH)
    by_place = np.array([0.0, 0.0, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75] + [0.75] * DEPTH)
    for row, start in enumerate(rollouts.start):
        rollouts.entropy[row] = by_place[start : start + DEPTH]
    (trace,) = replay.self_verify(rollouts, DEPTH)
    # Round 1 drafts place 1 (0.0) and place 2 (0.5 > 0), which is rejected; round 2 places 3, 4 (0.5) and 5 (0.75).
    assert [(step.num_drafted, step.num_accepted) for step in trace.steps] == [(2, 1), (3, 3), (1, 1)]
    policy = SelfVerify(DEPTH)
    policy.entropies = [0.5]
    policy.observe(1, 0)
    assert policy.threshold == 0.5


def test_the_oracle_leaves_an_answers_last_token_to_the_target():
    """Also of answers that an end token ends, far from their room: what it would draft there is discarded."""
    rollouts = hand_rollouts([[True] * 5, [True, False, True, True], [True, True, True, False]], DEPTH)
    traces = replay.replay(rollouts, replay.oracle(rollouts))
    rounds = [[(step.num_drafted, step.num_accepted) for step in trace.steps] for trace in traces]
    assert rounds == [[(3, 3)], [(0, 0), (1, 1)], [(2, 2)]]
    assert [trace.num_discarded for trace in traces] == [0, 0, 0]


@pytest.mark.parametrize(("nodes", "rounds"), [(1, [(1, 0), (1, 1)]), (2, [(2, 1)]), (3, [(3, 2)])])
def test_a_tree_of_n_nodes_holds_the_candidates_of_rank_below_n(nodes, rounds):
    # On the text: the second and the third best at the first place, the best at the second.
    rank = np.array([[[1, -1], [1, 2]], [[0, -1], [0, -1]]])
    answer = TargetAnswer("row", "task", 5, [0, 1, 2], True, 50)
    rollouts = TreeRollouts([answer], np.zeros(2, np.int64), np.array([1, 2]), 2, rank, np.full(2, 2))
    (trace,) = replay.replay_tree(rollouts, nodes, 1)
    assert [(step.num_drafted, step.num_accepted) for step in trace.steps] == rounds
