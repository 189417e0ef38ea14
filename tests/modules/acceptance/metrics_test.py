"""Acceptance metrics against scikit-learn on the expanded list of accept draws, and against hand-made cases."""

from __future__ import annotations

import math

import pytest
import sklearn.calibration
import sklearn.linear_model
import sklearn.metrics
import torch

from draftsmith.modules.acceptance.metrics import (
    binary_kl,
    brier,
    expected_calibration_error,
    fit_platt,
    soft_label_auc,
)

# scikit-learn works in float64 on other summation orders: a few units in the last place of a mean of hundreds.
TOLERANCE = 1e-9


def scores_and_labels(seed: int, count: int = 400, ties: bool = False):
    generator = torch.Generator().manual_seed(seed)
    logit = torch.randn(count, generator=generator, dtype=torch.float64)
    if ties:
        logit = (logit * 2).round() / 2
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    return logit, torch.sigmoid(1.5 * logit + noise)


def expanded(score, accept_prob):
    """Every token twice, as a positive of weight P and a negative of weight 1 - P."""
    labels = torch.cat([torch.ones_like(score), torch.zeros_like(score)])
    return labels, torch.cat([score, score]), torch.cat([accept_prob, 1 - accept_prob])


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_that_of_the_expanded_list(ties):
    score, label = scores_and_labels(0, ties=ties)
    labels, scores, weights = expanded(score, label)
    expected = sklearn.metrics.roc_auc_score(labels, scores, sample_weight=weights)
    assert float(soft_label_auc(score, label)) == pytest.approx(expected, abs=TOLERANCE)


def test_auc_without_negatives_is_undefined():
    assert math.isnan(soft_label_auc(torch.tensor([0.1, 0.2]), torch.tensor([1.0, 1.0])))


def test_kl_is_log_loss_less_the_entropy_of_the_labels():
    logit, label = scores_and_labels(1)
    labels, probs, weights = expanded(torch.sigmoid(logit), label)
    log_loss = sklearn.metrics.log_loss(labels, probs, sample_weight=weights)
    entropy = -(label * label.log() + (1 - label) * (1 - label).log()).mean()
    assert float(binary_kl(logit, label)) == pytest.approx(log_loss - float(entropy), abs=TOLERANCE)


def test_brier_is_the_expanded_score_less_the_accept_draws_own_variance():
    logit, label = scores_and_labels(2)
    labels, probs, weights = expanded(torch.sigmoid(logit), label)
    expected = sklearn.metrics.brier_score_loss(labels, probs, sample_weight=weights) - float(
        (label * (1 - label)).mean()
    )
    assert float(brier(torch.sigmoid(logit), label)) == pytest.approx(expected, abs=TOLERANCE)


def test_ece_of_two_bins_by_hand():
    prob, label = torch.tensor([0.9, 0.1, 0.2, 0.8]), torch.tensor([1.0, 0.3, 0.4, 0.4])
    # Bin 1 holds 0.1 and 0.2 against 0.3 and 0.4: gap 0.2. Bin 2 holds 0.8 and 0.9 against 0.4 and 1.0: gap 0.15.
    assert float(expected_calibration_error(prob, label, 2)) == pytest.approx(0.175)


def test_platt_agrees_with_scikit_learn():
    logit, label = scores_and_labels(3)
    outcome, inputs, weights = expanded(logit, label)
    model = sklearn.linear_model.LogisticRegression(C=1e12, tol=1e-12, max_iter=1000)
    model.fit(inputs[:, None], outcome, weights)
    found = fit_platt(logit, label, ridge=0.0)
    assert found == pytest.approx((model.coef_[0, 0], model.intercept_[0]), abs=1e-5)


def test_platt_stays_finite_on_separable_labels():
    scale, bias = fit_platt(torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert 1 < scale < 100 and abs(bias) < 1
