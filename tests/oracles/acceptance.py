"""Acceptance of drafted tokens, token by token in Python floats; no code is shared with the product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from oracles.formulas import warped
from torch import Tensor

from draftsmith.modules.types import SamplingParams


def token_labels(p_logits: Tensor, q_logits: Tensor, token: int, params: SamplingParams) -> dict[str, float]:
    """Label a drafted token by what the target and the draft say in its place, logits [V] each.

    Greedy: agreement of the first choices, and log-probabilities at temperature 1.
    """
    p, q = (warped(logits, params if params.temperature else SamplingParams(1.0)) for logits in (p_logits, q_logits))
    accept = min(1.0, p[token] / q[token]) if params.temperature else float(token == int(p_logits.argmax()))
    log_p = math.log(p[token]) if p[token] else -math.inf
    return {"log_p": log_p, "log_q": math.log(q[token]), "accept_prob": accept}


def drawn(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Return the token that a uniform number draws of logits [V], or the first choice."""
    if not params.temperature:
        return int(logits.argmax())
    total = torch.tensor(warped(logits, params)).cumsum(0)
    return int(torch.searchsorted(total, uniform, right=True))


def right_by_place(
    drafts: Sequence[Sequence[int]], starts: Sequence[int], ids: Sequence[int], choices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Count by place the drafted tokens that are the target's choice, and those that were compared: whose draft was
    right before, and the text. choices: in place of each token of the text; -1 where none is of an answer."""
    right, compared = [0] * len(drafts[0]), [0] * len(drafts[0])
    for draft, start in zip(drafts, starts, strict=True):
        for depth, (token, place) in enumerate(zip(draft, range(start, len(ids)), strict=False)):
            if choices[place] < 0:
                break
            compared[depth] += 1
            right[depth] += token == choices[place]
            if token != choices[place] or token != ids[place]:
                break
    return right, compared
