"""What a draft's own distribution says of the token that was drawn from it: the features of acceptance predictors.

Of a greedy draft the distribution is the softmax of its logits at temperature 1, and the token its mode. Natural
logarithms, entropies in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftedStep, DraftView

# Beyond these log-odds a softmax in float32 says little.
MAX_LOGIT = 12.0
SMALLEST = 1e-38  # in the place of 0, which has no logarithm


class TokenConfidence(NamedTuple):
    """Numbers of one token: log q(y), log max q, and the distribution's entropy."""

    log_q: float
    log_max_q: float
    entropy: float


@dataclass(frozen=True)
class TokenConfidences:
    """Numbers of many tokens, as of `TokenConfidence`, float32 [..]; their places in the round, from 1; the
    temperatures of their distributions; and, where it was looked for, how they go on with repetitions of the text, and
    the mean of that over what may be drawn (`repeats.RepeatScores`)."""

    log_q: Tensor
    log_max_q: Tensor
    entropy: Tensor
    depth: Tensor
    temperature: Tensor
    repeat: Tensor | None = None
    repeat_mean: Tensor | None = None


def draft_distribution(view: DraftView) -> Tensor:
    """The distribution [V] that the token was drawn from; of a greedy draft the softmax of its logits, which is worked
    out once, whoever asks."""
    if view.draft_prob is not None:
        return view.draft_prob
    if view.softmax is None:
        if view.step is None:
            view.softmax = wide(view.logits).softmax(-1)
        else:
            view.softmax = view.step.once("rows of softmax", lambda step: distributions_of(step).unbind())[view.place]
    return view.softmax


def distributions_of(step: DraftedStep) -> Tensor:
    """`draft_distribution` of all rows of a step, [R, V]."""
    if step.draft_prob is not None:
        return step.draft_prob
    return step.once("softmax", lambda step: wide(step.logits).softmax(-1))


def wide(values: Tensor) -> Tensor:
    """The numbers in float32, or in float64 where they are."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def confidence_of(view: DraftView, asked: Literal["token", "mode", "entropy"] = "entropy") -> TokenConfidence:
    """Confidence of the token that a stop policy is shown. asked: the dearest number that is; dearer ones are NaN.

    A draft waits for it, so that the calls are few, and numpy's where that is possible, which have less between them
    and the work: no logarithm of a distribution is taken, but of its mode, from which log p = log max p - (max l - l) /
    T for any other token of logit l."""
    if asked == "token":
        return TokenConfidence(log_q_of(view), math.nan, math.nan)
    distribution = draft_distribution(view)
    if distribution.is_cuda:
        if view.step is not None:
            return view.step.once(asked, lambda step: _on_device(distributions_of(step), step.tokens, asked))[
                view.place
            ]
        return _on_device(distribution[None], torch.tensor([view.token], device=distribution.device), asked)[0]
    log_q, probs = log_q_of(view), distribution.numpy()
    best = mode_of(view, probs)
    log_max_q = log_q if best == view.token else math.log(probs.item(best))
    if asked == "mode":
        return TokenConfidence(log_q, log_max_q, math.nan)
    logits = wide(view.logits)
    mean = torch.dot(
        distribution, logits if logits.dtype == distribution.dtype else logits.to(distribution.dtype)
    ).item()
    spread = (logits.numpy().item(best) - mean) / (view.temperature or 1.0) - log_max_q
    if not math.isfinite(spread):  # logits of minus infinity, and 0 times that
        spread = entropies(distribution).item()
    return TokenConfidence(log_q, log_max_q, spread)


def _on_device(distributions: Tensor, tokens: Tensor, asked: Literal["mode", "entropy"]) -> list[TokenConfidence]:
    """`confidence_of` of tokens [R] by their distributions [R, V], in one transfer."""
    given = [distributions.gather(1, tokens[:, None])[:, 0], distributions.amax(1)]
    given.append(entropies(distributions) if asked == "entropy" else torch.full_like(given[0], math.nan))
    return [TokenConfidence(log_of(own), log_of(most), spread) for own, most, spread in torch.stack(given, 1).tolist()]


def mode_of(view: DraftView, probs: Any) -> int:
    """A most probable token of the view's distribution, an array [V]: the token shown where it was chosen for that, or
    has half of the mass; only else is the array looked through."""
    token = view.token
    return token if view.draft_prob is None or probs.item(token) >= 0.5 else int(probs.argmax())


def log_q_of(view: DraftView) -> float:
    """log q of the token that a stop policy is shown, looked up once, whoever asks: less work than `confidence_of`."""
    if view.log_q is None and view.step is not None:
        view.log_q = view.step.once("log_q", log_qs)[view.place]
    elif view.log_q is None:
        distribution = draft_distribution(view) if view.draft_prob is None else view.draft_prob
        own = distribution[view.token].item() if distribution.is_cuda else distribution.numpy().item(view.token)
        view.log_q = math.log(SMALLEST if own < SMALLEST else own)
    return view.log_q


def log_qs(step: DraftedStep) -> list[float]:
    """`log_q_of` of all rows of a step."""
    return [log_of(q) for q in distributions_of(step).gather(1, step.tokens[:, None])[:, 0].tolist()]


def log_max_q_of(view: DraftView) -> float:
    """The same of the most probable token."""
    distribution = draft_distribution(view)
    if distribution.is_cuda:
        return log_of(distribution.max().item())
    probs = distribution.numpy()
    return log_of(probs.item(mode_of(view, probs)))


def log_of(prob: float) -> float:
    """Its logarithm, of 0 that of the smallest number."""
    return math.log(SMALLEST if prob < SMALLEST else prob)


def confidences_of(distributions: Tensor, tokens: Tensor, depth: Tensor, temperature: Tensor) -> TokenConfidences:
    """Confidences of tokens [..] by the distributions [.., V] that they were drawn from."""
    own = distributions.gather(-1, tokens[..., None])[..., 0]
    return TokenConfidences(
        own.log(), distributions.amax(-1).log(), entropies(distributions), depth.float(), temperature.float()
    )


def entropies(distributions: Tensor) -> Tensor:
    """-sum p log p [nats] of distributions [.., V]; entries of probability zero add nothing."""
    return -torch.xlogy(distributions, distributions).sum(-1)


def log_odds(log_prob: float) -> float:
    """log(q / (1 - q)) of log q, within [-MAX_LOGIT, MAX_LOGIT]."""
    if log_prob >= 0:
        return MAX_LOGIT
    logit = log_prob - math.log(-math.expm1(log_prob))
    # A token waits for it: comparisons take less than calls of `min` and `max`. NaN stays.
    return MAX_LOGIT if logit > MAX_LOGIT else -MAX_LOGIT if logit < -MAX_LOGIT else logit


def log_odds_of(log_prob: Tensor) -> Tensor:
    """`log_odds` of a tensor; NaN stays."""
    return (log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))).clamp(-MAX_LOGIT, MAX_LOGIT)


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), of any logit."""
    # Neither branch's exponential can overflow.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
