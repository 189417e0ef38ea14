"""Drawing one chain: the loop that every chain drafter shares, whatever gives its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftTree, DraftView, Source, StopPolicy
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import best_token, probabilities
from draftsmith.modules.types import SamplingParams


def draft_chain(
    logits: Tensor,
    states: Tensor,
    step: Callable[[int], tuple[Tensor, Tensor]],
    stop: StopPolicy,
    max_drafted: int,
    params: SamplingParams,
    source: Source,
    context: Sequence[int] = (),
) -> DraftTree:
    """Draft until `stop` says so, at most `max_drafted` tokens.

    logits [V], states [T, H]: of the forward that read the last emitted token, whose hidden state is the last one.
    step(token): read one drafted token; the logits [V] of what follows, and the hidden state [1, H].
    context: what the policy may look at, all tokens before the draft.
    The token that `stop` was shown last stays in the draft: it is paid for, and dropping it would bias the output.

    Raises:
        NonFinite: the drafter's logits, or what the policy reads; its position is the token's place in the draft.
    """
    tokens: list[int] = []
    laws: list[Tensor] = []
    stop.start_round()
    try:
        while len(tokens) < max_drafted:
            if params.greedy:
                law = None
                token = best_token(logits)
            else:
                law = probabilities(logits, params)
                token = source.draw(law)
                laws.append(law)
            tokens.append(token)
            view = DraftView(len(tokens), token, states, logits, law, params.temperature, context)
            if stop.should_stop(view) or len(tokens) == max_drafted:
                break
            logits, states = step(token)
    except NonFinite as error:
        raise error.passed(offset=len(tokens)) from None
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), torch.stack(laws) if laws else None)
