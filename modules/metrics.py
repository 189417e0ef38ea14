"""How good a predicted acceptance probability is, from vectors of scores and soft labels.

A label P in [0, 1] is the probability that a drafted token is accepted (SpecDec++ section 3.3). Each token counts as
P of a positive and 1 - P of a negative, which is what drawing acceptance many times would converge to. N tokens;
where a weight [N] is given each counts that much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 15
MAX_KNOTS = 40
RESOLUTION = 1e-3  # of logits: as good as equal, and far above what float32 knots can tell apart


def binary_kl(logit: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean KL(P || sigmoid(logit)) in nats, whatever the training weighs; all are [N]."""
    prob = accept_prob.double()
    cross_entropy = F.binary_cross_entropy_with_logits(logit.double(), prob, reduction="none")
    return _mean(cross_entropy + torch.xlogy(prob, prob) + torch.xlogy(1 - prob, 1 - prob), weight)


def brier(prob: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean squared distance of the predicted probability [N] from P [N], which is the Brier score of accept draws
    less their own variance."""
    return _mean((prob.double() - accept_prob.double()).square(), weight)


def expected_calibration_error(
    prob: Tensor, accept_prob: Tensor, num_bins: int = NUM_BINS, weight: Tensor | None = None
) -> Tensor:
    """Mean |predicted - observed| over bins of equal mass (Nguyen & O'Connor 2015): tokens sorted by `prob` [N] and cut
    into `num_bins` parts whose sizes differ by at most one, or, of weighted tokens, where the middle of a token's
    weight falls; a bin weighs as much as its tokens."""
    order = prob.argsort(stable=True)
    gap = (prob.double() - accept_prob.double())[order]
    if weight is None:
        return torch.stack([part.sum().abs() for part in gap.tensor_split(num_bins)]).sum() / len(gap)
    mass = weight.double()[order]
    return sums_by(gap * mass, equal_mass_bins(mass, num_bins), num_bins).abs().sum() / mass.sum()


def soft_label_auc(score: Tensor, accept_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Probability that a random positive has a higher score than a random negative, ties counting half; [N] each.

    The pairs of a token's own positive and negative share are ties, as in a list that holds every token twice. NaN
    where there is no positive or no negative mass.
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
    """[size] sums of values [N] by their group [N]."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def equal_mass_bins(mass: Tensor, num_bins: int) -> Tensor:
    """The bin of each of N items in their order, of `num_bins` bins of equal mass: where the middle of its own falls.
    An item that is heavier than a bin leaves others empty."""
    middle = mass.cumsum(0) - mass / 2
    return (middle * (num_bins / mass.sum())).long().clamp(0, num_bins - 1)


def fit_platt(
    logit: Tensor, accept_prob: Tensor, ridge: float = 1e-2, weight: Tensor | None = None
) -> tuple[float, float]:
    """Scale and bias such that sigmoid(scale * logit + bias) fits P best in binary KL (Platt 1999).

    ridge: strength of a pull to (1, 0), in tokens; it keeps the answer finite where the labels are separable.
    """
    scale, bias = fit_logistic(logit[:, None], accept_prob, [1.0, 0.0], ridge, weight).tolist()
    return scale, bias


def fit_logistic(
    inputs: Tensor, accept_prob: Tensor, start: Sequence[float], ridge: float = 1e-2, weight: Tensor | None = None
) -> Tensor:
    """Weights [F+1] in float64, the last one a bias, such that sigmoid(inputs @ weights + bias) fits P [N] best in
    binary KL, by Newton's method; inputs [N, F].

    start: where it begins. ridge: strength of a pull to it, in tokens.
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


def pooled(values: Tensor, mass: Tensor) -> Tensor:
    """The ascending sequence [N] nearest to `values` [N] in squares weighted by `mass` [N] > 0: isotonic regression, by
    pooling adjacent violators (Ayer et al. 1955). Float64."""
    means: list[float] = []
    masses: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values.tolist(), mass.tolist(), strict=True):
        size = 1
        while means and means[-1] >= value:
            total = masses[-1] + weight
            value, weight = (means.pop() * masses.pop() + value * weight) / total, total
            size += sizes.pop()
        means.append(value)
        masses.append(weight)
        sizes.append(size)
    fitted = torch.tensor(means, dtype=torch.float64, device=values.device)
    return fitted.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=values.device))


def fit_isotonic(
    logit: Tensor, accept_prob: Tensor, weight: Tensor | None = None, num_knots: int = MAX_KNOTS
) -> tuple[tuple[float, float], ...]:
    """2 to `num_knots` knots (logit, calibrated logit), ascending in both: isotonic calibration of logits [N], with
    straight lines between the knots and their end values beyond them (Zadrozny & Elkan 2002, made continuous).

    Tokens are put into `num_knots` bins of equal mass, and bins pooled until their means of P ascend; a knot is the
    mean logit of a pool and the log-odds of its mean P, which is taken to be no surer than half a token in the lowest
    and in the highest pool would make it. Logits within RESOLUTION are one.
    """
    each = torch.ones_like(accept_prob, dtype=torch.float64) if weight is None else weight.double()
    x, group = torch.unique((logit.double() / RESOLUTION).round(), return_inverse=True)
    mass, accepted = sums_by(each, group, len(x)), sums_by(each * accept_prob.double(), group, len(x))
    bins = equal_mass_bins(mass, num_knots)
    totals, accepted, sums = (sums_by(part, bins, num_knots) for part in (mass, accepted, mass * x))
    kept = totals > 0
    totals, accepted, sums = totals[kept], accepted[kept], sums[kept]
    levels, pool = torch.unique(pooled(accepted / totals, totals), return_inverse=True)
    pools = sums_by(totals, pool, len(levels))
    places = RESOLUTION * sums_by(sums, pool, len(levels)) / pools
    surest = levels.clamp(0.5 / float(pools[0] + 1), 1 - 0.5 / float(pools[-1] + 1))
    knots = tuple(zip(places.tolist(), surest.logit().tolist(), strict=True))
    return knots if len(knots) > 1 else (knots[0], (knots[0][0] + 1, knots[0][1]))


def acceptance_metrics(
    logit: Tensor, accept_prob: Tensor, log_q: Tensor | None = None, weight: Tensor | None = None
) -> dict[str, float]:
    """kl, brier, ece and auc of calibrated logits [N] against labels [N]; auc_q is the AUC of the draft's own
    probability q(y_i) alone, from its logarithm [N]: what a head has to beat."""
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
