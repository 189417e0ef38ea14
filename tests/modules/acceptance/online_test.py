"""The online logistic against the matrix formula, and verdicts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftsmith.modules.acceptance.online import MAX_LOGIT, OnlineLogistic, log_odds
from draftsmith.modules.decoding.stop import sigmoid


def test_its_steps_equal_the_matrix_formula():
    rng = np.random.default_rng(0)
    weights, precision = np.array([1.0, 0.0, 0.0]), np.eye(3)
    model = OnlineLogistic(2)
    for _ in range(200):
        x, label = rng.normal(size=2) * 2, rng.random()
        z = np.append(x, 1.0)
        prob = 1 / (1 + np.exp(-weights @ z))
        precision += prob * (1 - prob) * np.outer(z, z)
        weights = weights + np.linalg.inv(precision) @ z * (label - prob)
        model.update(x.tolist(), label)
    # Float64 both; the inverse is formed in another way.
    np.testing.assert_allclose(model.weights, weights, rtol=1e-9)


@pytest.mark.parametrize(
    ("num_accepted", "labels"), [(0, [0.0]), (2, [1.0, 1.0, 0.0]), (4, [1.0, 1.0, 1.0, 1.0])], ids=str
)
def test_a_verdict_is_learned_up_to_the_first_rejection(num_accepted, labels):
    features = [[0.5], [-1.0], [2.0], [0.0]]
    told, expected = OnlineLogistic(), OnlineLogistic()
    told.observe(features, num_accepted)
    for x, label in zip(features, labels, strict=False):
        expected.update(x, label)
    assert told.weights == expected.weights


def test_certain_tokens_stay_finite():
    assert log_odds(1.0) == MAX_LOGIT and log_odds(0.0) == -MAX_LOGIT
    model = OnlineLogistic()
    for _ in range(1000):
        model.update([MAX_LOGIT], 0.0)
    assert math.isfinite(model.weights[0]) and 0 <= model.prob([MAX_LOGIT]) < 0.5


def test_log_odds_and_their_inverse():
    for prob in (1e-4, 0.3, 0.5, 0.999):
        assert log_odds(prob) == pytest.approx(math.log(prob / (1 - prob)))
        # So the model begins.
        assert sigmoid(log_odds(prob)) == pytest.approx(prob) == OnlineLogistic().prob([log_odds(prob)])
    assert (sigmoid(-1e4), sigmoid(1e4)) == (0.0, 1.0) and math.isnan(log_odds(math.nan))
