"""Metrics of predicted acceptance probabilities, from vectors of scores and soft labels.

A label P in [0, 1] is the probability that a drafted token is accepted (SpecDec++ section 3.3). Each of the N tokens
counts as P of a positive and 1 - P of a negative, the limit of drawing acceptance many times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 15


def binary_kl(logit: Tensor, accept_prob: Tensor) -> Tensor:
    """Compute the mean KL(P || sigmoid(logit)) in nats; all are [N]."""
    prob = accept_prob.double()
    cross_entropy = F.binary_cross_entropy_with_logits(logit.double(), prob, reduction="none")
    return (cross_entropy + torch.xlogy(prob, prob) + torch.xlogy(1 - prob, 1 - prob)).mean()


def brier(prob: Tensor, accept_prob: Tensor) -> Tensor:
    """Compute the mean squared distance of the probability [N] from P [N].

    It is the Brier score of acceptance draws, less their own variance.
    """
    return (prob.double() - accept_prob.double()).square().mean()


def expected_calibration_error(prob: Tensor, accept_prob: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Compute the mean |predicted - observed| over bins of equal mass (Nguyen & O'Connor 2015).

    Tokens are sorted by `prob` [N] and cut into `num_bins` parts whose sizes differ by at most one.
    """
    gap = (prob.double() - accept_prob.double())[prob.argsort(stable=True)]
    return torch.stack([part.sum().abs() for part in gap.tensor_split(num_bins)]).sum() / len(gap)


def soft_label_auc(score: Tensor, accept_prob: Tensor) -> Tensor:
    """Compute the probability that a random positive scores higher than a random negative; ties count half.

    A token's own positive and negative share tie, as in a list that holds every token twice. NaN if there is no
    positive or no negative mass.
    """
    prob = accept_prob.double()
    _, group = torch.unique(score, return_inverse=True)
    sums = torch.zeros(int(group.max()) + 1 if len(score) else 0, dtype=torch.float64, device=score.device)
    positives, negatives = sums.index_add(0, group, prob), sums.index_add(0, group, 1 - prob)
    below = negatives.cumsum(0) - negatives
    return (positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum())


def fit_platt(logit: Tensor, accept_prob: Tensor, ridge: float = 1e-2) -> tuple[float, float]:
    """Fit scale and bias such that sigmoid(scale * logit + bias) is closest to P [N] in binary KL (Platt 1999), by
    Newton's method in float64.

    ridge: strength of a pull to (1, 0), in tokens; it keeps the result finite for separable labels.
    """
    inputs = torch.stack([logit.double(), torch.ones_like(logit, dtype=torch.float64)], 1)  # [N, 2]
    label = accept_prob.double()
    begin, eye = inputs.new_tensor([1.0, 0.0]), torch.eye(2).to(inputs)

    def objective(weights: Tensor) -> Tensor:
        fit = F.binary_cross_entropy_with_logits(inputs @ weights, label, reduction="sum")
        return fit + ridge * (weights - begin).square().sum()

    weights, value = begin, objective(begin)
    for _ in range(100):
        prob = torch.sigmoid(inputs @ weights)
        gradient = inputs.T @ (prob - label) + 2 * ridge * (weights - begin)
        hessian = (inputs * (prob * (1 - prob))[:, None]).T @ inputs + 2 * ridge * eye
        step = torch.linalg.solve(hessian, gradient)
        scale = 1.0
        # The objective is convex; Newton's full step may still overshoot far from the optimum.
        while objective(weights - scale * step) > value and scale > 1e-6:
            scale /= 2
        weights, previous = weights - scale * step, value
        value = objective(weights)
        if previous - value <= 1e-10 * len(label):
            break
    scale, bias = weights.tolist()
    return scale, bias


def acceptance_metrics(logit: Tensor, accept_prob: Tensor, log_q: Tensor | None = None) -> dict[str, float]:
    """Compute kl, brier, ece and auc of calibrated logits [N] against labels [N].

    auc_q: the AUC of the draft's own probability q(y_i), from its logarithm [N], which a head has to beat.
    """
    prob = torch.sigmoid(logit.double())
    metrics = {
        "kl": binary_kl(logit, accept_prob),
        "brier": brier(prob, accept_prob),
        "ece": expected_calibration_error(prob, accept_prob),
        "auc": soft_label_auc(logit, accept_prob),
    }
    if log_q is not None:
        metrics["auc_q"] = soft_label_auc(log_q, accept_prob)
    return {name: float(value) for name, value in metrics.items()}
