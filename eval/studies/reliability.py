"""How good predicted probabilities and scores are, as the tables and diagrams of a study show it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.metrics import NUM_BINS, binary_kl, brier, expected_calibration_error, soft_label_auc

# Fewer tokens say too little about calibration or ranking to be printed.
MIN_TOKENS = 100


def reliability_bins(prob: Tensor, accept_prob: Tensor, num_bins: int = NUM_BINS) -> list[dict[str, float]]:
    """Bins of equal mass, those that the expected calibration error sums over (modules/metrics.py), lowest first.

    prob, accept_prob [N]. Each: predicted and observed, means over the bin, and count, its tokens. Empty bins are left
    out.
    """
    order = prob.argsort(stable=True)
    bins = zip(
        prob.double()[order].tensor_split(num_bins), accept_prob.double()[order].tensor_split(num_bins), strict=True
    )
    return [
        {"predicted": float(predicted.mean()), "observed": float(observed.mean()), "count": len(predicted)}
        for predicted, observed in bins
        if len(predicted)
    ]


def quality(score: Tensor, prob: Tensor | None, accept_prob: Tensor) -> dict[str, Any]:
    """tokens, auc, and where there is a probability brier, ece and kl [nats], all against soft labels; None where there
    are fewer than MIN_TOKENS tokens, or no probability, or where a number is not defined. All [N]."""
    found: dict[str, Any] = {"tokens": len(score), "auc": None, "brier": None, "ece": None, "kl": None}
    if len(score) < MIN_TOKENS:
        return found
    found["auc"] = _finite(soft_label_auc(score, accept_prob))
    if prob is not None:
        found["brier"] = _finite(brier(prob, accept_prob))
        found["ece"] = _finite(expected_calibration_error(prob, accept_prob))
        # A softmax that rounds to 0 or 1 would cost infinitely much.
        found["kl"] = _finite(binary_kl(torch.logit(prob.double(), eps=1e-6), accept_prob))
    return found


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
