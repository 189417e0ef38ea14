"""Metrics of predicted acceptance probabilities, from vectors of scores and soft labels.

A label P in [0, 1] is the probability that a drafted token is accepted (SpecDec++ section 3.3). Each token counts as
P of a positive and 1 - P of a negative, the limit of drawing acceptance many times. N tokens; weight [N]: how much each
counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 15


def binary_kl(logit: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean KL(P || sigmoid(logit)) in nats; all are [N]."""
    prob = accept_prob.double()
    cross_entropy = F.binary_cross_entropy_with_logits(logit.double(), prob, reduction="none")
    return _mean(cross_entropy + torch.xlogy(prob, prob) + torch.xlogy(1 - prob, 1 - prob), weight)


def brier(prob: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean squared distance of the probability [N] from P [N].

    It is the Brier score of acceptance draws, less their own variance.
    """
    return _mean((prob.double() - accept_prob.double()).square(), weight)


def expected_calibration_error(
    prob: Tensor, accept_prob: Tensor, num_bins: int = NUM_BINS, weight: Tensor | None = None
) -> Tensor:
    """Compute the mean |predicted - observed| over bins of equal mass (Nguyen & O'Connor 2015).

    Tokens are sorted by `prob` [N] and cut into `num_bins` parts whose sizes differ by at most one; weighted tokens go
    where the middle of their weight falls. A bin weighs as much as its tokens.
    """
    order = prob.argsort(stable=True)
    gap = (prob.double() - accept_prob.double())[order]
    if weight is None:
        return torch.stack([part.sum().abs() for part in gap.tensor_split(num_bins)]).sum() / len(gap)
    mass = weight.double()[order]
    middle = mass.cumsum(0) - mass / 2
    bins = (middle * (num_bins / mass.sum())).long().clamp(0, num_bins - 1)
    return sums_by(gap * mass, bins, num_bins).abs().sum() / mass.sum()


def soft_label_auc(score: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the probability that a random positive scores higher than a random negative; ties count half.

    A token's own positive and negative share tie, as in a list that holds every token twice. NaN if there is no
    positive or no negative mass.
    """
    prob = accept_prob.double()
    mass = torch.ones_like(prob) if weight is None else weight.double()
    _, group = torch.unique(score, return_inverse=True)
    size = int(group.max()) + 1 if len(score) else 0
    positives, negatives = sums_by(mass * prob, group, size), sums_by(mass * (1 - prob), group, size)
    below = negatives.cumsum(0) - negatives
    return (positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum())


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.mean() if weight is None else (values * weight.double()).sum() / weight.double().sum()


def sums_by(values: Tensor, group: Tensor, size: int) -> Tensor:
    """Sum values [N] by their group [N]: [size]."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def fit_platt(
    logit: Tensor, accept_prob: Tensor, ridge: float = 1e-2, weight: Tensor | None = None
) -> tuple[float, float]:
    """Fit scale and bias such that sigmoid(scale * logit + bias) is closest to P in binary KL (Platt 1999).

    ridge: strength of a pull to (1, 0), in tokens; it keeps the result finite for separable labels.
    """
    scale, bias = fit_logistic(logit[:, None], accept_prob, [1.0, 0.0], ridge, weight).tolist()
    return scale, bias


def fit_logistic(
    inputs: Tensor, accept_prob: Tensor, start: Sequence[float], ridge: float = 1e-2, weight: Tensor | None = None
) -> Tensor:
    """Fit sigmoid(inputs @ weights + bias) to P [N] in binary KL by Newton's method; inputs [N, F].

    start: initial weights and bias. ridge: strength of a pull to it, in tokens.
    Returns [F + 1] in float64, the bias last.
    """
    inputs = torch.cat([inputs.double(), torch.ones(len(inputs), 1, dtype=torch.float64, device=inputs.device)], 1)
    label = accept_prob.double()
    mass = None if weight is None else weight.double()
    each = torch.ones_like(label) if mass is None else mass
    begin = torch.tensor(start, dtype=torch.float64, device=inputs.device)
    eye = torch.eye(len(begin)).to(inputs)

    def objective(weights: Tensor) -> Tensor:
        fit = F.binary_cross_entropy_with_logits(inputs @ weights, label, mass, reduction="sum")
        return fit + ridge * (weights - begin).square().sum()

    weights, value = begin, objective(begin)
    for _ in range(100):
        prob = torch.sigmoid(inputs @ weights)
        gradient = inputs.T @ (each * (prob - label)) + 2 * ridge * (weights - begin)
        hessian = (inputs * (each * prob * (1 - prob))[:, None]).T @ inputs + 2 * ridge * eye
        step = torch.linalg.solve(hessian, gradient)
        scale = 1.0
        # The objective is convex; Newton's full step may still overshoot far from the optimum.
        while objective(weights - scale * step) > value and scale > 1e-6:
            scale /= 2
        weights, previous = weights - scale * step, value
        value = objective(weights)
        if previous - value <= 1e-10 * len(label):
            break
    return weights


def acceptance_metrics(
    logit: Tensor, accept_prob: Tensor, log_q: Tensor | None = None, weight: Tensor | None = None
) -> dict[str, float]:
    """Compute kl, brier, ece and auc of calibrated logits [N] against labels [N].

    auc_q: the AUC of the draft's own probability q(y_i), from its logarithm [N], which a head has to beat.
    """
    prob = torch.sigmoid(logit.double())
    metrics = {
        "kl": binary_kl(logit, accept_prob, weight),
        "brier": brier(prob, accept_prob, weight),
        "ece": expected_calibration_error(prob, accept_prob, weight=weight),
        "auc": soft_label_auc(logit, accept_prob, weight),
    }
    if log_q is not None:
        metrics["auc_q"] = soft_label_auc(log_q, accept_prob, weight)
    return {name: float(value) for name, value in metrics.items()}
