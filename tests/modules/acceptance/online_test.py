"""The online logistic against the matrix formula, a converged fit, and verdicts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from draftsmith.modules.acceptance.online import OnlineLogistic, OnlinePredictor
from draftsmith.modules.decoding.confidence import MAX_LOGIT, log_odds, sigmoid


def test_it_starts_by_predicting_the_first_feature():
    model = OnlineLogistic()
    for prob in (0.01, 0.5, 0.97):
        assert model.prob([log_odds(math.log(prob))]) == pytest.approx(prob)


def test_its_steps_equal_the_matrix_formula():
    rng = np.random.default_rng(0)
    weights, precision = np.array([1.0, 0.0, 0.0]), 2.0 * np.eye(3)
    model = OnlineLogistic(2, prior=2.0)
    for _ in range(200):
        x, label = rng.normal(size=2) * 2, rng.random()
        z = np.append(x, 1.0)
        prob = 1 / (1 + np.exp(-weights @ z))
        precision += prob * (1 - prob) * np.outer(z, z)
        weights = weights + np.linalg.inv(precision) @ z * (label - prob)
        model.update(x.tolist(), label)
    # Float64 both; the inverse is formed in another way.
    np.testing.assert_allclose(model.weights, weights, rtol=1e-9)


def test_it_approaches_the_fit_to_all_labels():
    rng = np.random.default_rng(1)
    x = rng.normal(size=20000) * 2
    label = rng.random(20000) < 1 / (1 + np.exp(-(0.6 * x + 0.8)))
    model = OnlineLogistic()
    for value, accepted in zip(x, label, strict=True):
        model.update([float(value)], float(accepted))
    fit = LogisticRegression(C=np.inf).fit(x[:, None], label)
    # One pass is not the optimum; its distance is well below the fit's own standard error of about 0.02.
    assert model.weights[0] == pytest.approx(fit.coef_[0, 0], abs=5e-3)
    assert model.weights[1] == pytest.approx(fit.intercept_[0], abs=5e-3)


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
    assert log_odds(0.0) == MAX_LOGIT and log_odds(-1e9) == -MAX_LOGIT
    model = OnlineLogistic()
    for _ in range(1000):
        model.update([MAX_LOGIT], 0.0)
    assert math.isfinite(model.weights[0]) and 0 <= model.prob([MAX_LOGIT]) < 0.5


def test_forgetting_affects_the_direction_of_the_labels_only():
    """A long stream of one token is remembered by its last labels; other directions keep their information."""
    model, steady = OnlineLogistic(memory=100), OnlineLogistic()
    for n in range(2000):
        for own in (model, steady):
            own.update([1.0], float(n % 2))
    z = np.ones(2)
    curvature = model.prob([1.0]) * (1 - model.prob([1.0]))
    assert z @ np.array(model.state_dict()["inverse"]) @ z == pytest.approx(1 / (100 * curvature), rel=0.05)
    across = np.array([1.0, -1.0])
    for own in (model, steady):
        assert across @ np.array(own.state_dict()["inverse"]) @ across == pytest.approx(2.0)


def losses_of(kind: str, seed: int, size: int = 5000) -> dict[str, np.ndarray]:
    """Simulate rounds of up to 8 tokens; return the log loss [nats] of verified tokens by predictor, and their places.

    Acceptance depends on three numbers. The logistics read two of them, and a head that is right knows all.
    """
    rng = np.random.default_rng(seed)
    q, repeat, state = rng.normal(1, 2.5, size), rng.choice([-1, 0, 4], size), rng.normal(0, 1.2, size)
    logit = 0.6 * q + 0.5 * repeat + state + 0.3
    accepted, wrong = rng.random(size) < 1 / (1 + np.exp(-logit)), rng.normal(0, 3, size)
    head = {"wrong": wrong, "right for half of it": np.where(np.arange(size) < size // 2, logit, wrong)}[kind]
    features = np.column_stack([head, q, repeat]).tolist()
    both, online = OnlineLogistic(3, OnlinePredictor.TRUST, OnlinePredictor.MEMORY), OnlineLogistic(2)
    losses: dict[str, list[float]] = {"head": [], "both": [], "online": [], "place": []}
    start = 0
    while start < size:
        stop = min(start + 8, size)
        num_accepted = int(np.cumprod(accepted[start:stop]).sum())
        for n in range(start, min(start + num_accepted + 1, stop)):
            probs = {"head": sigmoid(features[n][0]), "both": both.prob(features[n])}
            probs["online"] = online.prob(features[n][1:])
            for name, prob in probs.items():
                losses[name].append(-math.log(prob if accepted[n] else 1 - prob))
            losses["place"].append(n)
        both.observe(features[start:stop], num_accepted)
        online.observe([x[1:] for x in features[start:stop]], num_accepted)
        start += min(num_accepted + 1, stop - start)
    return {name: np.array(values) for name, values in losses.items()}


@pytest.mark.parametrize(("kind", "first", "bound"), [("wrong", 2000, 0.002), ("right for half of it", 3500, 0.004)])
def test_a_head_that_does_not_help_is_given_up(kind, first, bound):
    """Without forgetting, one that was right before would still cost 0.02 nats a token."""
    runs = [losses_of(kind, seed) for seed in range(3)]
    more = np.concatenate([(run["both"] - run["online"])[run["place"] >= first] for run in runs])
    assert more.mean() <= bound + 2 * more.std() / math.sqrt(len(more))


def test_a_wrong_head_is_corrected_from_the_start():
    runs = [losses_of("wrong", seed) for seed in range(3)]
    more = np.concatenate([run["both"] - run["head"] for run in runs])
    assert more.mean() + 4 * more.std() / math.sqrt(len(more)) < 0
