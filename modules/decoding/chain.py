"""Draft chains: the loop shared by all chain drafters, whatever computes their logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Expand, Level
from draftsmith.modules.decoding.stop import DraftView, FixedLengthStop, StopPolicy
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, chain_parents
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Sampler, can_choose_ahead, choose_ahead, skip_ahead


def draft_chain(
    root: Level,
    expand: Expand,
    stop: StopPolicy,
    limit: int,
    sampler: Sampler,
    context: Sequence[int],
    end_ids: Collection[int] = (),
) -> DraftTree:
    """Draft until the policy stops, an end token is drafted, or `limit` tokens are.

    root: of the forward that read the last emitted token.
    context: the tokens before the draft, for the policy.
    end_ids: tokens that end the answer; whatever is drafted behind one is thrown away (SpecDec++, footnote 1).

    The token that a policy was shown last stays in the draft: it is paid for, and dropping it would bias the output.

    Raises:
        NonFinite: the drafter's logits, or what the policy reads; the position counts within the draft.
    """
    longest, fixed = min(limit, stop.max_drafted), type(stop) is FixedLengthStop
    if longest < 1:
        return NO_DRAFT
    if fixed and root.logits.is_cuda and can_choose_ahead(sampler.params, [sampler.source]):
        return draft_ahead(root, expand, longest, sampler, end_ids)
    if not fixed:
        stop.start_round()
    level, tokens, drawn_from = root, list[int](), list[Tensor]()
    while True:
        logits = level.logits[0]
        token, q = sampler.draw(logits, len(tokens))
        tokens.append(token)
        if q is not None:
            drawn_from.append(q)

        # A policy that learns has to see every token, the end token too.
        count, stopped = len(tokens), False
        if not fixed:
            view = DraftView(count, token, level.hidden, logits, q, context)
            try:
                stopped = stop.should_stop(view)
            except NonFinite as error:
                error.position = count + (error.position or 0)
                raise
        if stopped or count == longest or token in end_ids:
            return DraftTree(tuple(tokens), chain_parents(count), drawn_from or None, draft_calls=count)
        level = expand(tokens[-1:], None, count)


def draft_ahead(root: Level, expand: Expand, length: int, sampler: Sampler, end_ids: Collection[int] = ()) -> DraftTree:
    """Draft a chain of known length (1 or more) on a GPU, without waiting for each token: one transfer brings all.

    What is drafted behind an end token is dropped.
    """
    chosen = list(
        choose_ahead(
            root.logits, lambda ids, depth: expand(ids, None, depth).logits, length, sampler.params, [sampler.source]
        )
    )
    tokens = torch.cat([ids for ids, _ in chosen]).tolist()  # [K]
    count = next((place for place, token in enumerate(tokens, 1) if token in end_ids), length)
    drafted = tuple(tokens[:count])
    # As many as drafting token by token takes.
    if NO_TOKEN in drafted:
        what = "logits" if sampler.greedy else "probabilities"
        raise NonFinite(what, position=drafted.index(NO_TOKEN))
    skip_ahead(count, sampler.params, [sampler.source])
    q = torch.cat([prob for _, prob in chosen[:count] if prob is not None]) if not sampler.greedy else None  # [K, V]
    return DraftTree(drafted, chain_parents(count), q, draft_calls=count)
