"""Confidence of a draft in the token drawn from its distribution: the features of acceptance predictors.

A greedy draft's distribution is the softmax of its logits at temperature 1, and the token its mode. Natural logarithms,
entropies in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftedStep, DraftView

# Beyond these log-odds a softmax in float32 has no precision left.
MAX_LOGIT = 12.0
# Stands for 0, which has no logarithm.
SMALLEST = 1e-38


class TokenConfidence(NamedTuple):
    """log q(y), log max q and the entropy of one token's distribution."""

    log_q: float
    log_max_q: float
    entropy: float


@dataclass(frozen=True)
class TokenConfidences:
    """The same numbers of many tokens, float32 [..].

    depth: place in the round, from 1. temperature: of the distribution. repeat: if computed, whether the token
    continues a repetition of the text (`repeats.RepeatScores`).
    """

    log_q: Tensor
    log_max_q: Tensor
    entropy: Tensor
    depth: Tensor
    temperature: Tensor
    repeat: Tensor | None = None


def draft_distribution(view: DraftView) -> Tensor:
    """Return the distribution [V] of the token; the softmax of a greedy draft is computed once for all callers."""
    if view.draft_prob is not None:
        return view.draft_prob
    if view.softmax is None:
        if view.step is None:
            view.softmax = wide(view.logits).softmax(-1)
        else:
            view.softmax = view.step.once("rows of softmax", lambda step: distributions_of(step).unbind())[view.place]
    return view.softmax


def distributions_of(step: DraftedStep) -> Tensor:
    """Return `draft_distribution` of all rows of a step, [R, V]."""
    if step.draft_prob is not None:
        return step.draft_prob
    return step.once("softmax", lambda step: wide(step.logits).softmax(-1))


def wide(values: Tensor) -> Tensor:
    """Convert to float32, unless it is float32 or float64 already."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def confidence_of(view: DraftView, asked: Literal["token", "mode", "entropy"] = "entropy") -> TokenConfidence:
    """Compute the confidence of the token in a view.

    asked: the most expensive number that is needed; more expensive ones are NaN.
    """
    if asked == "token":
        return TokenConfidence(log_q_of(view), math.nan, math.nan)
    distribution = draft_distribution(view)
    if distribution.is_cuda:
        if view.step is not None:
            rows = view.step.once(asked, lambda step: _on_device(distributions_of(step), step.tokens, asked))
            return rows[view.place]
        return _on_device(distribution[None], torch.tensor([view.token], device=distribution.device), asked)[0]
    # The next draft step waits for these numbers, so calls are few, and NumPy's where possible.
    log_q, probs = log_q_of(view), distribution.numpy()
    # The view's token if it was chosen for that, or has half of the mass; only otherwise is the array searched.
    is_mode = view.draft_prob is None or probs.item(view.token) >= 0.5
    best = view.token if is_mode else int(probs.argmax())
    log_max_q = log_q if best == view.token else math.log(probs.item(best))
    if asked == "mode":
        return TokenConfidence(log_q, log_max_q, math.nan)
    # No logarithm of the whole distribution: log p = log max p - (max l - l) / T for a token of logit l.
    logits = wide(view.logits)
    mean = torch.dot(distribution, logits.to(distribution.dtype)).item()
    entropy = (logits.numpy().item(best) - mean) / (view.temperature or 1.0) - log_max_q
    # A logit of minus infinity, and 0 times that.
    if not math.isfinite(entropy):
        entropy = entropies(distribution).item()
    return TokenConfidence(log_q, log_max_q, entropy)


def _on_device(distributions: Tensor, tokens: Tensor, asked: Literal["mode", "entropy"]) -> list[TokenConfidence]:
    """Compute `confidence_of` tokens [R] with distributions [R, V], in one transfer."""
    parts = [distributions.gather(1, tokens[:, None])[:, 0], distributions.amax(1)]
    parts.append(entropies(distributions) if asked == "entropy" else torch.full_like(parts[0], math.nan))
    return [TokenConfidence(_log(q), _log(most), entropy) for q, most, entropy in torch.stack(parts, 1).tolist()]


def log_q_of(view: DraftView) -> float:
    """Return log q of the view's token, computed once for all callers."""
    if view.log_q is None and view.step is not None:

        def all_rows(step: DraftedStep) -> list[float]:
            return [_log(q) for q in distributions_of(step).gather(1, step.tokens[:, None])[:, 0].tolist()]

        view.log_q = view.step.once("log_q", all_rows)[view.place]
    elif view.log_q is None:
        distribution = draft_distribution(view) if view.draft_prob is None else view.draft_prob
        own = distribution[view.token].item() if distribution.is_cuda else distribution.numpy().item(view.token)
        view.log_q = _log(own)
    return view.log_q


def _log(prob: float) -> float:
    return math.log(SMALLEST if prob < SMALLEST else prob)


def confidences_of(distributions: Tensor, tokens: Tensor, depth: Tensor, temperature: Tensor) -> TokenConfidences:
    """Compute confidences of tokens [..] drawn from distributions [.., V]."""
    own = distributions.gather(-1, tokens[..., None])[..., 0]
    return TokenConfidences(
        own.log(), distributions.amax(-1).log(), entropies(distributions), depth.float(), temperature.float()
    )


def entropies(distributions: Tensor) -> Tensor:
    """Compute -sum p log p in nats of distributions [.., V]; entries of probability zero add nothing."""
    return -torch.xlogy(distributions, distributions).sum(-1)


def log_odds(log_prob: float) -> float:
    """Return log(q / (1 - q)) of log q, within [-MAX_LOGIT, MAX_LOGIT]; NaN stays."""
    if log_prob >= 0:
        return MAX_LOGIT
    logit = log_prob - math.log(-math.expm1(log_prob))
    # Comparisons take less time than `min` and `max`, for every drafted token.
    return MAX_LOGIT if logit > MAX_LOGIT else -MAX_LOGIT if logit < -MAX_LOGIT else logit


def log_odds_of(log_prob: Tensor) -> Tensor:
    """Apply `log_odds` to a tensor."""
    return (log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))).clamp(-MAX_LOGIT, MAX_LOGIT)


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)). Neither branch's exponential can overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
