"""The decoder's only loop: draft, score, verify, commit, for any number of rows, one row a special case.

Each row is decoded as if it were alone: its drafts, its lengths, its random numbers and its counts do not depend on the
rows beside it. Autoregressive decoding is the loop without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import NO_DRAFT, Drafter, DraftTree, Outcome, Verdict
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM, ModelInfo, Scores, Session, check_ids
from draftsmith.modules.types import InputError, SamplingParams


@dataclass(frozen=True)
class Generation:
    """Emitted tokens [N], and what they cost. `ended`: the last one is an end token."""

    tokens: list[int]
    trace: DecodeTrace
    ended: bool


@dataclass(frozen=True)
class Round:
    """What `on_round` sees: the tokens a round emitted, of which the first `num_accepted` had been drafted.

    tree, verdict and step: what was drafted, what the target decided, and the counts; logits: [N+1, V] of the target,
    row 0 scores the root's children. None for the prefill, which emits the first token. row: number of the prompt.
    """

    tokens: list[int]
    num_accepted: int
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    step: DecodeStep | None = None
    logits: Tensor | None = None
    row: int = 0


@dataclass(frozen=True)
class Setup:
    """What a generation is run with beside its models; the distribution of its tokens does not depend on it.

    on_round: is called after every round of every row.
    session: one of the target's to use again, for the graphs that it holds, with room for these rows and the features
        that the drafter reads; None makes one.
    max_nodes: most drafted tokens of a row that the target scores in one call.
    """

    on_round: Callable[[Round], None] | None = None
    session: Session | None = None
    max_nodes: int = MAX_NODES


PLAIN = Setup()


def session_capacity(prompt_length: int, max_new_tokens: int, max_nodes: int) -> int:
    """Cache slots that a generation can need: everything kept, and one round's root and nodes."""
    return prompt_length + max_new_tokens + max_nodes + 1


@torch.inference_mode()
def generate(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    sources: Sequence[Source],
    eos_ids: Sequence[int] | None = None,
    setup: Setup = PLAIN,
) -> list[Generation]:
    """Generate up to `max_new_tokens` for each prompt; the output follows the target's distribution whatever the
    drafter does.

    sources: one a prompt: what a row draws is its source's whatever the rows beside it.
    eos_ids: tokens that end an answer (kept in it); None takes the target's, () never ends.

    Raises:
        InputError: empty prompt, one with tokens that the target does not have, or with no room left in its context.
        NonFinite: a model gave numbers that choose no token; its row is the prompt's number.
    """
    ends = frozenset(target.info.eos_ids if eos_ids is None else eos_ids)
    rows = [
        RowAnswer(ends, room_for(prompt, max_new_tokens, target.info), number, len(prompt), source)
        for number, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
    ]
    capture = () if drafter is None else drafter.capture
    session, max_nodes = setup.session, setup.max_nodes
    if session is None:
        most = max(session_capacity(row.num_prompt, row.room, max_nodes) for row in rows)
        session = target.session(len(rows), min(most, target.info.max_position + max_nodes + 1), capture)
    if session.capture != capture:
        raise ValueError(f"session: captures {session.capture}, and the drafter reads {capture}")
    session.reset(len(rows))
    batch = _RowBatch(rows, session, drafter, params, setup, target.info.max_position)
    batch.prefill(prompts)
    while batch.drop_done():
        batch.round()
    return [Generation(row.tokens, row.trace, row.ended) for row in rows]


def generate_one(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    source: Source,
    eos_ids: Sequence[int] | None = None,
    setup: Setup = PLAIN,
) -> Generation:
    """`generate` for a single prompt."""
    return generate(target, drafter, [prompt], params, max_new_tokens, [source], eos_ids, setup)[0]


def room_for(prompt: Sequence[int], max_new_tokens: int, info: ModelInfo) -> int:
    """Most tokens that may follow the prompt in a target's context.

    Raises:
        InputError: as `generate` does.
    """
    limit = info.max_position
    if not 0 < len(prompt) < limit:
        raise InputError(
            "prompt", f"{len(prompt)} tokens", f"1 to {limit - 1}, the target's context", "Shorten the prompt."
        )
    check_ids(prompt, info.vocab_size)
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "1 or more", "Ask for at least one token.")
    return min(max_new_tokens, limit - len(prompt))


class RowAnswer:
    """One sequence: emitted tokens, what they cost, and whether its generation is over.

    ends: tokens that end it. room: most tokens. number, num_prompt: of the prompt, from 0, and its length. source: its
    own random numbers.
    """

    def __init__(self, ends: frozenset[int], room: int, number: int, num_prompt: int, source: Source):
        self.ends, self.room = ends, room
        self.number, self.num_prompt, self.source = number, num_prompt, source
        self.tokens: list[int] = []
        self.trace = DecodeTrace()
        self.ended = False

    @property
    def num_read(self) -> int:
        """Tokens that the target has read: all but the last."""
        return self.num_prompt + len(self.tokens) - 1

    @property
    def done(self) -> bool:
        return self.ended or len(self.tokens) >= self.room

    def emit(self, tokens: list[int]) -> list[int]:
        """Append, cut at the first end token and at the limit; what was appended."""
        for i, token in enumerate(tokens):
            if token in self.ends:
                tokens, self.ended = tokens[: i + 1], True
                break
        if len(self.tokens) + len(tokens) > self.room:
            tokens = tokens[: self.room - len(self.tokens)]
            self.ended = tokens[-1] in self.ends
        self.tokens += tokens
        return tokens


class _RowBatch:
    """The rows that are decoded together, in the order of the session's. limit: positions of the target's context."""

    def __init__(
        self,
        rows: list[RowAnswer],
        session: Session,
        drafter: Drafter | None,
        params: SamplingParams,
        setup: Setup,
        limit: int,
    ):
        self._rows, self._session, self._drafter = rows, session, drafter
        self._params, self._on_round = params, setup.on_round
        self._limit, self._max_nodes = limit, setup.max_nodes
        self._sources = [row.source for row in rows]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts and emit every row's first token."""
        scores = self._session.extend(prompts)
        try:
            verdicts = verify([NO_DRAFT] * len(prompts), scores.logits, self._params, self._sources)
        except NonFinite as error:
            raise self._named(error) from None
        first_tokens = []
        for row, verdict in zip(self._rows, verdicts, strict=True):
            assert verdict is not None and verdict.next_token is not None
            first_tokens.append(verdict.next_token)
            row.trace.prefill_emitted = 1
            appended = row.emit([verdict.next_token])
            if self._on_round is not None:
                self._on_round(Round(appended, 0, row=row.number))
        if self._drafter is not None and not all(row.done for row in self._rows):
            features = [own[: len(prompt)] for own, prompt in zip(scores.features, prompts, strict=True)]
            self._drafter.start(prompts, features, first_tokens)

    def drop_done(self) -> bool:
        """Let rows leave whose answers are complete; false when none is left. Where shapes are to recur they idle along
        until half of the batch is done."""
        kept = [i for i, row in enumerate(self._rows) if not row.done]
        idle = self._session.static and 2 * len(kept) > len(self._rows)
        if 0 < len(kept) < len(self._rows) and not idle:
            self._session.select(kept)
            if self._drafter is not None:
                self._drafter.select(kept)
            self._rows = [self._rows[i] for i in kept]
            self._sources = [row.source for row in self._rows]
        return len(kept) > 0

    def round(self) -> None:
        """Draft, score, verify, commit."""
        rows, session = self._rows, self._session
        try:
            trees = self._draft()
            scores = read(session, [row.tokens[-1] for row in rows], trees)
            verdicts = verify(trees, scores.logits, self._params, self._sources)
        except NonFinite as error:
            raise self._named(error) from None
        lengths = list(session.lengths)
        slots: list[Sequence[int]] = [()] * len(rows)
        outcomes: list[Outcome | None] = [None] * len(rows)
        for place, (row, tree, verdict) in enumerate(zip(rows, trees, verdicts, strict=True)):
            if tree is not None and verdict is not None:  # else it idles
                first = lengths[place] = lengths[place] - tree.num_read  # the slot of the first node
                read_path = [node for node in verdict.path if node < tree.num_read]
                slots[place] = [first + node for node in read_path]
                outcomes[place] = self._commit(row, tree, verdict, read_path, scores, place)
        session.keep(lengths, slots)
        if self._drafter is not None and any(outcome is not None for outcome in outcomes):
            self._drafter.advance(outcomes)

    def _draft(self) -> list[DraftTree | None]:
        """What each row drafts; None where its answer is complete."""
        # A draft may not outrun the context: node positions go up to kept + depth. Nor is there any use in drafting
        # past the last token wanted, whose value the round's own token gives.
        limits = [
            0 if row.done else min(row.room - len(row.tokens) - 1, self._limit - row.num_read - 1, self._max_nodes)
            for row in self._rows
        ]
        trees: Sequence[DraftTree] = [NO_DRAFT] * len(limits)
        if self._drafter is not None and max(limits) > 0:
            trees = self._drafter.propose(limits, self._params, self._sources)
        return [None if row.done else tree for row, tree in zip(self._rows, trees, strict=True)]

    def _commit(
        self, row: RowAnswer, tree: DraftTree, verdict: Verdict, read_path: Sequence[int], scores: Scores, place: int
    ) -> Outcome | None:
        """The end of a round: what a row emits, and what its drafter is to hear; None where the answer is complete.
        place: of the row in the session. read_path: of the verdict's path what the target has read."""
        emitted = [tree.tokens[node] for node in verdict.path]
        if verdict.next_token is not None:
            emitted.append(verdict.next_token)
        appended = row.emit(emitted)
        num_accepted = len(verdict.path)
        calls = tree.draft_calls if tree.tokens else 0
        step = DecodeStep(tree.num_drafted, num_accepted, len(appended), calls)
        row.trace.steps.append(step)
        logits = scores.logits[place]
        if len(logits) > tree.num_read + 1:
            logits = logits[: tree.num_read + 1]
        if self._on_round is not None:
            self._on_round(Round(appended, min(num_accepted, len(appended)), tree, verdict, step, logits, row.number))
        if row.done:
            return None
        count, features = len(read_path) + 1, scores.features[place]
        if read_path and read_path[-1] != count - 2:  # else a slice, which costs nothing
            features = features[[0, *(node + 1 for node in read_path)]]
        else:
            features = features[:count]
        return Outcome(tuple(emitted), num_accepted, features, logits)

    def _named(self, error: NonFinite) -> NonFinite:
        """A row's error, which tells where the row stands and which prompt it is of; it is the target's unless another
        model is named."""
        row = self._rows[error.row or 0]
        error.row = row.number
        return error.passed("target", row.num_read + 1)


def read(session: Session, roots: Sequence[int], trees: Sequence[DraftTree | None]) -> Scores:
    """One target call: each row's root and its tree's nodes, all of them with logits; nothing of a row without one."""
    fed = [
        [] if tree is None else [root, *tree.tokens[: tree.num_read]] for root, tree in zip(roots, trees, strict=True)
    ]
    widest = max(map(len, fed))
    if all(tree is None or tree.is_chain for tree in trees):
        return session.extend(fed, num_logits=widest)
    parents = [
        [] if tree is None else [-1, *[parent + 1 for parent in tree.parents[: tree.num_read]]] for tree in trees
    ]
    return session.extend(fed, parents, num_logits=widest)
