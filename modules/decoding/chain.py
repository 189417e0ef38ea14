"""Draft chains for any number of rows: the loop shared by all chain drafters, whatever computes their logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import (
    NO_DRAFT,
    DraftedStep,
    DraftTree,
    DraftView,
    StopPolicy,
    chain_parents,
)
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import (
    Source,
    TorchSource,
    best_each,
    choose_ahead,
    draw_each,
    probabilities,
)
from draftsmith.modules.types import SamplingParams

# Reads each row's next drafted token: a list with one or none for each row, or int64 [B, 1]. Returns the next logits
# [B, V] and states [B, H], undefined for rows without a token.
Step = Callable[[list[list[int]] | Tensor], tuple[Tensor, Tensor]]


def draft_chains(
    logits: Tensor,
    states: Tensor,
    step: Step,
    stops: Sequence[StopPolicy],
    limits: Sequence[int],
    params: SamplingParams,
    sources: Sequence[Source],
    contexts: Sequence[Sequence[int]],
    end_ids: Collection[int] = (),
) -> list[DraftTree]:
    """Draft in each row until its policy stops, an end token is drafted, or limits[b] tokens are.

    logits [B, V] and states [B, H]: of the forward that read the last emitted tokens.
    contexts: the tokens before each row's draft, for policies.
    end_ids: tokens that end the answer; whatever is drafted behind one is thrown away (SpecDec++, footnote 1).

    The token that a policy was shown last stays in the draft: it is paid for, and dropping it would bias the output.

    Raises:
        NonFinite: the drafter's logits, or what a policy reads; the position counts within the row's draft.
    """
    lengths = [max(0, min(limit, stop.max_drafted)) for limit, stop in zip(limits, stops, strict=True)]
    fixed = set(map(type, stops)) == {FixedLength}
    if fixed and logits.is_cuda and (params.greedy or all(isinstance(source, TorchSource) for source in sources)):
        return draft_fixed_length(logits, step, lengths, params, sources)
    rows = [row for row, length in enumerate(lengths) if length]  # still drafting
    for row in rows if not fixed else ():
        stops[row].start_round()
    tokens: list[list[int]] = [[] for _ in lengths]
    drawn_from: list[list[Tensor]] = [[] for _ in lengths]
    # Number of tokens drafted in each of `rows`.
    count = 0
    while rows:
        # Choose one token for each row that is still drafting.
        row_logits = logits.unbind()
        q: Tensor | None = None
        if not params.greedy:
            q = probabilities(logits if len(rows) == len(lengths) else logits[rows], params)  # [R, V]
            q_rows = q.unbind()
            drawn = draw_each(q, [sources[row] for row in rows])
        else:
            drawn = best_each(logits, rows)
        if NO_TOKEN in drawn:
            what = "logits" if q is None else "probabilities"
            raise NonFinite(what, position=count, row=rows[drawn.index(NO_TOKEN)])
        count += 1

        # Ask each row's policy. A policy that learns has to see every token, the end token too.
        together = DraftedStep(rows, drawn, states, logits, q) if len(rows) > 1 and not fixed else None
        drafting = []
        for place, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            tokens[row].append(token)
            distribution = None if q is None else q_rows[place]
            if distribution is not None:
                drawn_from[row].append(distribution)
            stopped = False
            if not fixed:
                own_states = states if len(lengths) == 1 else states[row : row + 1]
                own = row_logits[row], distribution, params.temperature, contexts[row]
                try:
                    stopped = stops[row].should_stop(DraftView(count, token, own_states, *own, together, place))
                except NonFinite as error:
                    error.row, error.position = row, count + (error.position or 0)
                    raise
            if not stopped and count < lengths[row] and token not in end_ids:
                drafting.append(row)
        rows = drafting
        if rows:
            still = set(rows)
            logits, states = step([own[-1:] if row in still else [] for row, own in enumerate(tokens)])
    return [
        DraftTree(tuple(own), chain_parents(len(own)), q or None, draft_calls=len(own)) if own else NO_DRAFT
        for own, q in zip(tokens, drawn_from, strict=True)
    ]


def draft_fixed_length(
    logits: Tensor,
    step: Step,
    lengths: Sequence[int],
    params: SamplingParams,
    sources: Sequence[Source],
) -> list[DraftTree]:
    """Draft chains of known lengths on a GPU, without waiting for each token: one transfer brings all of them.

    Shorter rows are drafted on with the others, and end tokens are not looked for; what is too much is dropped.
    """
    longest = max(lengths, default=0)
    if longest < 1:
        return [NO_DRAFT] * len(lengths)
    ahead = choose_ahead(logits, lambda ids: step(ids)[0], lengths, params, sources)
    drawn, drawn_from = zip(*ahead, strict=True)
    tokens = torch.stack(drawn, 1).tolist()  # [B, K]
    q = None if params.greedy else torch.stack(drawn_from, 1)  # [B, K, V]
    for row, length in enumerate(lengths):
        if NO_TOKEN in tokens[row][:length]:
            what = "logits" if q is None else "probabilities"
            raise NonFinite(what, position=tokens[row].index(NO_TOKEN), row=row)
    trees = []
    for row, count in enumerate(lengths):
        own_q = None if q is None else q[row, :count]
        chain = DraftTree(tuple(tokens[row][:count]), chain_parents(count), own_q, draft_calls=count)
        trees.append(chain if count else NO_DRAFT)
    return trees
