"""Confidence of a draft in the token drawn from its distribution: the features of acceptance predictors.

A greedy draft's distribution is the softmax of its logits at temperature 1, and the token its mode. Natural logarithms,
entropies in nats.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.decoding.stop import DraftView
from draftsmith.modules.sampling import entropies, wide

# Beyond these log-odds a softmax in float32 has no precision left.
MAX_LOGIT = 12.0
# Stands for 0, which has no logarithm.
SMALLEST = 1e-38


class TokenConfidence(NamedTuple):
    """Numbers of one drafted token, or of many, float32 tensors [..].

    log_q, log_max_q, entropy: log q(y), log max q and the entropy of the token's distribution.
    depth: place in the round, from 1. temperature: of the distribution. repeat: if computed, whether the token
    continues a repetition of the text (`repeats.RepeatIndex.score`).
    """

    log_q: Any
    log_max_q: Any
    entropy: Any
    depth: Any
    temperature: Any
    repeat: Any = None


def confidence_of(view: DraftView, need: str = "entropy") -> TokenConfidence:
    """Compute the confidence of the token in a view.

    need: "token" < "mode" < "entropy", the most expensive number that is read; more expensive ones are NaN.
    """
    depth, temperature = float(view.num_drafted), view.temperature
    if need == "nothing":
        return TokenConfidence(math.nan, math.nan, math.nan, depth, temperature)
    if need == "token":
        return TokenConfidence(_log(view.prob), math.nan, math.nan, depth, temperature)
    distribution = view.distribution
    if distribution.is_cuda:
        if view.batch is not None:
            rows = view.batch.once(need, lambda batch: _on_device(batch.distributions, batch.tokens, need))
            log_q, log_max_q, entropy = rows[view.place]
        else:
            token = torch.tensor([view.token], device=distribution.device)
            log_q, log_max_q, entropy = _on_device(distribution[None], token, need)[0]
        return TokenConfidence(log_q, log_max_q, entropy, depth, temperature)
    # The next draft step waits for these numbers, so calls are few, and NumPy's where possible.
    log_q, probs = _log(view.prob), distribution.numpy()
    # The view's token if it was chosen for that, or has half of the mass; only otherwise is the array searched.
    is_mode = view.draft_prob is None or probs.item(view.token) >= 0.5
    best = view.token if is_mode else int(probs.argmax())
    log_max_q = log_q if best == view.token else math.log(probs.item(best))
    if need == "mode":
        return TokenConfidence(log_q, log_max_q, math.nan, depth, temperature)
    # No logarithm of the whole distribution: log p = log max p - (max l - l) / T for a token of logit l.
    logits = wide(view.logits)
    mean = torch.dot(distribution, logits.to(distribution.dtype)).item()
    entropy = (logits.numpy().item(best) - mean) / (temperature or 1.0) - log_max_q
    # A logit of minus infinity, and 0 times that.
    if not math.isfinite(entropy):
        entropy = entropies(distribution).item()
    return TokenConfidence(log_q, log_max_q, entropy, depth, temperature)


def _on_device(distributions: Tensor, tokens: Tensor, need: str) -> list[tuple[float, float, float]]:
    """Return log q, log max q and the entropy of tokens [R] with distributions [R, V], in one transfer."""
    parts = [distributions.gather(1, tokens[:, None])[:, 0], distributions.amax(1)]
    parts.append(entropies(distributions) if need == "entropy" else torch.full_like(parts[0], math.nan))
    return [(_log(q), _log(most), entropy) for q, most, entropy in torch.stack(parts, 1).tolist()]


def _log(prob: float) -> float:
    return math.log(SMALLEST if prob < SMALLEST else prob)


def confidences_of(distributions: Tensor, tokens: Tensor, depth: Tensor, temperature: Tensor) -> TokenConfidence:
    """Compute confidences of tokens [..] drawn from distributions [.., V]."""
    own = distributions.gather(-1, tokens[..., None])[..., 0]
    return TokenConfidence(
        own.log(), distributions.amax(-1).log(), entropies(distributions), depth.float(), temperature.float()
    )


def log_odds(log_prob: Any) -> Any:
    """Return log(q / (1 - q)) of log q, within [-MAX_LOGIT, MAX_LOGIT]; NaN stays."""
    if isinstance(log_prob, Tensor):
        return (log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))).clamp(-MAX_LOGIT, MAX_LOGIT)
    if log_prob >= 0:
        return MAX_LOGIT
    logit = log_prob - math.log(-math.expm1(log_prob))
    # Comparisons take less time than `min` and `max`, for every drafted token.
    return MAX_LOGIT if logit > MAX_LOGIT else -MAX_LOGIT if logit < -MAX_LOGIT else logit


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)). Neither branch's exponential can overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
