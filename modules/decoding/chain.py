"""Drawing chains: the loop that every chain drafter shares, whatever gives its logits, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    best_token,
    best_tokens,
    chosen,
    draw_each,
    draw_rows,
    own_uniforms,
    probabilities,
)
from draftsmith.modules.types import SamplingParams

# Read each row's next drafted token, a list of one or none a row or int64 [B, 1]; the logits [B, V] of what follows and
# the states [B, H] there, which mean nothing of rows that were fed none.
Step = Callable[[list[list[int]] | Tensor], tuple[Tensor, Tensor]]


def draft_chains(
    read: tuple[Tensor, Tensor],
    step: Step,
    stops: Sequence[StopPolicy],
    limits: Sequence[int],
    params: SamplingParams,
    sources: Sequence[Source],
    contexts: Sequence[Sequence[int]],
) -> list[DraftTree]:
    """Draft in each row until its own policy stops, at most limits[b] tokens.

    read: logits [B, V] and states [B, H] of the forward that read the last emitted tokens.
    contexts: what policies may look at, each row's tokens before its draft.
    The token that a policy was shown last stays in the draft: it is paid for, and dropping it would bias the output.

    Raises:
        NonFinite: the drafter's logits, or what a policy reads; its position is the token's place in the row's draft.
    """
    ends = [min(limit, stop.max_drafted) for limit, stop in zip(limits, stops, strict=True)]
    for stop, end in zip(stops, ends, strict=True):
        if end > 0:
            stop.start_round()
    logits, states = read
    fixed = logits.is_cuda and all(isinstance(stop, FixedLength) for stop in stops)
    if fixed and (params.greedy or all(isinstance(source, TorchSource) for source in sources)):
        return draft_unseen(logits, step, ends, params, sources)
    tokens: list[list[int]] = [[] for _ in ends]
    distributions: list[list[Tensor]] = [[] for _ in ends]
    rows = [row for row, end in enumerate(ends) if end > 0]
    count = 0  # tokens of the rows that go on
    while rows:
        own_logits = logits.unbind()
        drawn, drawn_from = _choose(logits, own_logits, rows, count, params, sources)
        count += 1
        going = []
        together = DraftedStep(rows, drawn, states, logits, drawn_from) if len(rows) > 1 else None
        own_distributions = [None] * len(rows) if drawn_from is None else drawn_from.unbind()
        for place, (row, token, distribution) in enumerate(zip(rows, drawn, own_distributions, strict=True)):
            tokens[row].append(token)
            if distribution is not None:
                distributions[row].append(distribution)
            own_states = states if len(ends) == 1 else states[row : row + 1]
            own = own_logits[row], distribution, params.temperature, contexts[row]
            view = DraftView(count, token, own_states, *own, together, place)
            try:  # a context manager here is measurable on small models
                stopped = stops[row].should_stop(view)
            except NonFinite as error:
                error.row = row
                raise error.passed(offset=count) from None
            if not stopped and count < ends[row]:
                going.append(row)
        rows = going
        if rows:
            logits, states = step([own[-1:] if row in rows else [] for row, own in enumerate(tokens)])
    return [
        _chain(drafted, torch.stack(own) if own else None) for drafted, own in zip(tokens, distributions, strict=True)
    ]


def _chain(tokens: Sequence[int], distributions: Tensor | None) -> DraftTree:
    count = len(tokens)
    return DraftTree(tuple(tokens), chain_parents(count), distributions, draft_calls=count) if count else NO_DRAFT


def _choose(
    logits: Tensor,
    own_logits: Sequence[Tensor],
    rows: Sequence[int],
    place: int,
    params: SamplingParams,
    sources: Sequence[Source],
) -> tuple[list[int], Tensor | None]:
    """A token for each of `rows`, and the distributions [len(rows), V] that they were drawn from, None of greedy ones;
    own_logits: each row's. place: of the tokens in their drafts."""
    tokens: list[int] = []
    try:
        if params.greedy:
            if logits.is_cuda:
                tokens = chosen(best_tokens(logits[list(rows)]))
            else:
                for row in rows:
                    tokens.append(best_token(own_logits[row]))
            return tokens, None
        distributions = probabilities(logits if len(rows) == len(own_logits) else logits[list(rows)], params)
        own = distributions if distributions.is_cuda else distributions.unbind()
        return draw_each(own, [sources[row] for row in rows]), distributions
    except NonFinite as error:
        # Greedy on a CPU, those before it have a token; else it says itself which one has none.
        error.row = rows[len(tokens) if error.row is None else error.row]
        raise error.passed(offset=place) from None


def draft_unseen(
    logits: Tensor, step: Step, ends: Sequence[int], params: SamplingParams, sources: Sequence[Source]
) -> list[DraftTree]:
    """Chains of known lengths on a GPU: the host learns of their tokens when all are drawn. Rows that are to stop are
    drafted on with the others, and what is drafted is padding."""
    most = max(ends, default=0)
    if most < 1:
        return [NO_DRAFT] * len(ends)
    uniforms = None if params.greedy else own_uniforms(sources, [max(end, 0) for end in ends], logits.device)
    drawn: list[Tensor] = []
    distributions: list[Tensor] = []
    while True:
        if uniforms is None:
            drawn.append(best_tokens(logits))
        else:
            distributions.append(probabilities(logits, params))
            drawn.append(draw_rows(distributions[-1], uniforms[:, len(drawn)]))
        if len(drawn) == most:
            break
        logits, _ = step(drawn[-1].clamp_min(0)[:, None])  # what stands for no token cannot be read
    tokens = torch.stack(drawn, 1).tolist()
    stacked = torch.stack(distributions, 1) if distributions else None
    for row, end in enumerate(ends):
        if NO_TOKEN in tokens[row][: max(end, 0)]:
            what = "logits" if stacked is None else "probabilities"
            raise NonFinite(what, position=tokens[row].index(NO_TOKEN), row=row)
    return [
        _chain(own[: max(end, 0)], None if stacked is None else stacked[row, :end])
        for row, (own, end) in enumerate(zip(tokens, ends, strict=True))
    ]
