"""What a draft's own law says of the token that was drawn from it: the features of acceptance predictors.

Of a greedy draft the law is the softmax of its logits at temperature 1. Natural logarithms, entropies in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftView

# Beyond these log-odds a softmax in float32 says little.
MAX_LOGIT = 12.0
SMALLEST = 1e-38  # in the place of 0, whose logarithm would make 0 log 0 a NaN


class Confidence(NamedTuple):
    """Of one token: log q(y), log max q, and the law's entropy."""

    log_q: float
    log_max_q: float
    entropy: float


@dataclass(frozen=True)
class Confidences:
    """The same of many tokens, float32 [..]; their places in the round, from 1, and the temperatures of their laws."""

    log_q: Tensor
    log_max_q: Tensor
    entropy: Tensor
    depth: Tensor
    temperature: Tensor


def confidence_of(view: DraftView) -> Confidence:
    """Of the token that a stop policy is shown."""
    law = view.draft_prob
    log_law = view.logits.float().log_softmax(-1) if law is None else law.clamp_min(SMALLEST).log()
    spread = torch.dot(log_law.exp() if law is None else law, log_law)
    if law is None:  # greedy: the token is the most probable one
        log_q = log_law[view.token].item()
        return Confidence(log_q, log_q, -spread.item())
    return Confidence(log_law[view.token].item(), log_law.max().item(), -spread.item())


def confidences_of(laws: Tensor, tokens: Tensor, depth: Tensor, temperature: Tensor) -> Confidences:
    """Of tokens [..] and the laws [.., V] that they were drawn from."""
    own = laws.gather(-1, tokens[..., None])[..., 0]
    return Confidences(own.log(), laws.amax(-1).log(), entropies(laws), depth.float(), temperature.float())


def confidences_of_children(laws: Tensor, tokens: Tensor, depth: int, temperature: float) -> Confidences:
    """Of k tokens [n, k] that may follow each of n laws [n, V], all at one depth; every number is [n, k]."""
    own = laws.gather(-1, tokens).log()

    def same(values: Tensor) -> Tensor:
        return values[:, None].expand_as(own)

    def all_of(value: float) -> Tensor:
        return torch.full_like(own, value)

    return Confidences(own, same(laws.amax(-1).log()), same(entropies(laws)), all_of(depth), all_of(temperature))


def entropies(laws: Tensor) -> Tensor:
    """-sum p log p [nats] of laws [.., V]; entries of probability zero add nothing."""
    return -torch.xlogy(laws, laws).sum(-1)


def log_odds(log_prob: float) -> float:
    """log(q / (1 - q)) of log q, within [-MAX_LOGIT, MAX_LOGIT]."""
    if log_prob >= 0:
        return MAX_LOGIT
    logit = log_prob - math.log(-math.expm1(log_prob))
    return min(max(logit, -MAX_LOGIT), MAX_LOGIT)


def log_odds_of(log_prob: Tensor) -> Tensor:
    """`log_odds` of a tensor; NaN stays."""
    return (log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))).clamp(-MAX_LOGIT, MAX_LOGIT)


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), of any logit."""
    # Neither branch's exponential can overflow.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
