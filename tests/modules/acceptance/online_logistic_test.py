"""The online logistic against the matrix formula, a converged fit, and verdicts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.acceptance.policies import OnlinePredictor
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


def losses_of(head: str, seed: int, num_tokens: int = 5000) -> dict[str, np.ndarray]:
    """Simulate rounds of up to 8 tokens; return the log loss [nats] of verified tokens by predictor, and their places.

    Acceptance depends on three numbers; all predictors read two of them, and a right `head` knows all.
    """
    rng, size = np.random.default_rng(seed), num_tokens
    q, repeat, state = rng.normal(1, 2.5, size), rng.choice([-1, 0, 4], size), rng.normal(0, 1.2, size)
    logit = 0.6 * q + 0.5 * repeat + state + 0.3
    accepted = rng.random(size) < 1 / (1 + np.exp(-logit))
    wrong = rng.normal(0, 3, size)
    heads = {"constant": np.ones(size), "of another domain": wrong}
    heads["right for half of it"] = np.where(np.arange(size) < size // 2, logit, wrong)
    features = np.column_stack([heads[head], q, repeat]).tolist()
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


def excess(of: str, over: str, head: str, first: int) -> tuple[float, float]:
    """Return mean and standard error of a predictor's log loss per token beyond another's, from token `first` on."""
    runs = [losses_of(head, seed) for seed in range(3)]
    more = np.concatenate([(losses[of] - losses[over])[losses["place"] >= first] for losses in runs])
    return float(more.mean()), float(more.std() / math.sqrt(len(more)))


@pytest.mark.parametrize("head", ["constant", "of another domain"])
def test_a_useless_head_does_not_hurt_after_2000_tokens(head):
    mean, error = excess("both", "online", head, 2000)
    assert mean <= 0.002 + 2 * error
    mean, error = excess("both", "head", head, 0)
    assert mean + 4 * error < 0


def test_a_head_that_stops_helping_is_given_up():
    """Without forgetting it would still be 0.02 nats behind."""
    mean, error = excess("both", "online", "right for half of it", 3500)
    assert mean <= 0.004 + 2 * error


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
