"""Draft chains for any number of rows: the loop shared by all chain drafters, whatever computes their logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.stop import DraftView, FixedLengthStop, StepBatch, StopPolicy
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, chain_parents
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Sampler

# Reads each row's next drafted token: a list with one or none for each row, or int64 [B, 1], and their place in the
# draft, from 1. Returns the next logits [B, V] and states [B, H], undefined for rows without a token.
Step = Callable[[list[list[int]] | Tensor, int], tuple[Tensor, Tensor]]


def draft_chains(
    logits: Tensor,
    states: Tensor,
    step: Step,
    stops: Sequence[StopPolicy],
    limits: Sequence[int],
    sampler: Sampler,
    contexts: Sequence[Sequence[int]],
    end_ids: Collection[int] = (),
    on_token: Callable[[int, DraftView], None] | None = None,
) -> list[DraftTree]:
    """Draft in each row until its policy stops, an end token is drafted, or limits[b] tokens are.

    logits [B, V] and states [B, H]: of the forward that read the last emitted tokens.
    contexts: the tokens before each row's draft, for policies.
    end_ids: tokens that end the answer; whatever is drafted behind one is thrown away (SpecDec++, footnote 1).
    on_token: called with the row and the view of every drafted token, before the row's policy is asked.

    The token that a policy was shown last stays in the draft: it is paid for, and dropping it would bias the output.

    Raises:
        NonFinite: the drafter's logits, or what a policy reads; the position counts within the row's draft.
    """
    lengths = [max(0, min(limit, stop.max_drafted)) for limit, stop in zip(limits, stops, strict=True)]
    fixed = on_token is None and set(map(type, stops)) == {FixedLengthStop}
    if fixed and logits.is_cuda and sampler.seeded:
        return draft_fixed_length(logits, step, lengths, sampler, end_ids)
    rows = [row for row, length in enumerate(lengths) if length]  # still drafting
    for row in rows if not fixed else ():
        stops[row].start_round()
    tokens: list[list[int]] = [[] for _ in lengths]
    drawn_from: list[list[Tensor]] = [[] for _ in lengths]
    # Number of tokens drafted in each of `rows`.
    count = 0
    while rows:
        # Choose one token for each row that is still drafting.
        drawn, q = sampler.draw(logits, rows, count)
        row_logits, q_rows = logits.unbind(), None if q is None else q.unbind()
        count += 1

        # Ask each row's policy. A policy that learns has to see every token, the end token too.
        batch = StepBatch(rows, drawn, states, logits, q) if len(rows) > 1 and not fixed else None
        drafting = []
        for place, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            tokens[row].append(token)
            distribution = None if q_rows is None else q_rows[place]
            if distribution is not None:
                drawn_from[row].append(distribution)
            stopped = False
            if not fixed:
                own_states = states if len(lengths) == 1 else states[row : row + 1]
                own = row_logits[row], distribution, contexts[row]
                view = DraftView(count, token, own_states, *own, batch, place)
                if on_token is not None:
                    on_token(row, view)
                try:
                    stopped = stops[row].should_stop(view)
                except NonFinite as error:
                    error.row, error.position = row, count + (error.position or 0)
                    raise
            if not stopped and count < lengths[row] and token not in end_ids:
                drafting.append(row)
        rows = drafting
        if rows:
            still = set(rows)
            logits, states = step([own[-1:] if row in still else [] for row, own in enumerate(tokens)], count)
    return [
        DraftTree(tuple(own), chain_parents(len(own)), q or None, draft_calls=len(own)) if own else NO_DRAFT
        for own, q in zip(tokens, drawn_from, strict=True)
    ]


def draft_fixed_length(
    logits: Tensor,
    step: Step,
    lengths: Sequence[int],
    sampler: Sampler,
    end_ids: Collection[int] = (),
) -> list[DraftTree]:
    """Draft chains of known lengths on a GPU, without waiting for each token: one transfer brings all of them.

    Rows that are shorter, or end at an end token, are drafted on with the others; what is too much is dropped.
    """
    if max(lengths, default=0) < 1:
        return [NO_DRAFT] * len(lengths)
    drawn, drawn_from = zip(*sampler.ahead(logits, lambda ids, depth: step(ids, depth)[0], lengths), strict=True)
    tokens = torch.stack(drawn, 1).tolist()  # [B, K]
    q = None if sampler.greedy else torch.stack(drawn_from, 1)  # [B, K, V]
    trees = []
    for row, length in enumerate(lengths):
        ends = (place for place, token in enumerate(tokens[row][:length], 1) if token in end_ids)
        count = next(ends, length)
        own = tuple(tokens[row][:count])
        if NO_TOKEN in own:
            raise NonFinite("logits" if q is None else "probabilities", position=own.index(NO_TOKEN), row=row)
        own_q = None if q is None else q[row, :count]
        trees.append(DraftTree(own, chain_parents(count), own_q, draft_calls=count) if count else NO_DRAFT)
    # As many as drafting token by token takes.
    sampler.skip([len(tree.tokens) for tree in trees])
    return trees
