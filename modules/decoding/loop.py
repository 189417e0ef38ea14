"""The decoder's only loop: draft, score, verify, commit, for any number of rows, one row a special case.

Each row is decoded as if it were alone: its drafts, its lengths, its random numbers and its counts do not depend on the
rows beside it, nor on when they begin and end. A row whose answer is complete makes room for the next prompt at once
(iteration-level scheduling, Yu et al. 2022). Autoregressive decoding is the loop without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import NO_DRAFT, Drafter, DraftTree, Outcome, Verdict
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM, ModelInfo, Scores, Session, check_ids
from draftsmith.modules.types import InputError, SamplingParams, whole_number


@dataclass(frozen=True)
class Generation:
    """Emitted tokens [N], and what they cost. `ended`: the last one is an end token."""

    tokens: list[int]
    trace: DecodeTrace
    ended: bool


@dataclass(frozen=True)
class Round:
    """What `on_round` sees: the tokens a round emitted, of which the first `num_accepted` had been drafted.

    tree: what was drafted. verdict: what the target decided. step: the counts. logits: [N+1, V] of the target, row 0
    scores the root's children. These are None for the prefill, which emits the first token. row: number of the prompt.
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
    rows = [
        asked(target.info, prompt, max_new_tokens, source, eos_ids, number)
        for number, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
    ]
    longest = max(row.num_prompt + row.room for row in rows)
    for _ in RowPool(target, drafter, params, len(rows), longest, setup).run(rows):
        pass
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
    whole_number("max_new_tokens", max_new_tokens, 1)
    return min(max_new_tokens, limit - len(prompt))


def asked(
    info: ModelInfo,
    prompt: Sequence[int],
    max_new_tokens: int,
    source: Source,
    eos_ids: Sequence[int] | None = None,
    number: int = 0,
) -> RowAnswer:
    """What a pool is to answer. info: of the target. number: of the prompt; the others as of `generate`.

    Raises:
        InputError: as `generate` does.
    """
    ends = frozenset(info.eos_ids if eos_ids is None else eos_ids)
    return RowAnswer(ends, room_for(prompt, max_new_tokens, info), number, prompt, source)


class RowAnswer:
    """One sequence: emitted tokens, what they cost, and whether its generation is over.

    ends: tokens that end it. room: most tokens. number: of the prompt, from 0. source: its own random numbers.
    """

    def __init__(self, ends: frozenset[int], room: int, number: int, prompt: Sequence[int], source: Source):
        self.ends, self.room = ends, room
        self.number, self.prompt, self.num_prompt, self.source = number, prompt, len(prompt), source
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


class RowPool:
    """Rows that are decoded together, each from when it is admitted until its answer is complete.

    Places of its rows are those of the session's and of the drafter's. A place that is free is taken by the next row
    that is admitted, or else by one of the last rows (`_leave`).
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        params: SamplingParams,
        rows: int,
        longest: int,
        setup: Setup = PLAIN,
    ):
        """rows: most of them at a time, for which the drafter has room too. longest: most tokens of a prompt and its
        answer."""
        capture, nodes = () if drafter is None else drafter.capture, setup.max_nodes
        limit, session = target.info.max_position, setup.session
        if session is None:  # with room for everything kept, and one round's root and nodes
            session = target.session(rows, min(longest, limit) + nodes + 1, capture)
        if session.capture != capture:
            raise ValueError(f"session: captures {session.capture}, and the drafter reads {capture}")
        self._session, self._drafter, self._params, self._on_round = session, drafter, params, setup.on_round
        self._size, self._longest, self._limit, self._max_nodes = rows, longest, limit, nodes
        self._rows: list[RowAnswer] = []

    @property
    def num_going(self) -> int:
        """Rows whose answers are not complete."""
        return sum(not row.done for row in self._rows)

    @property
    def free(self) -> int:
        """Rows that may be admitted now."""
        going = self.num_going
        return self._size - going if self._session.joins or not going else 0

    def run(self, waiting: Iterable[RowAnswer]) -> Iterator[RowAnswer]:
        """Answer all of these, taken when there is room for them; each is given back once its answer is complete."""
        coming = iter(waiting)
        while True:
            while fresh := list(islice(coming, self.free)):
                yield from self.admit(fresh)
            if not self.num_going:
                return
            yield from self.round()

    @torch.inference_mode()
    def admit(self, fresh: Sequence[RowAnswer]) -> list[RowAnswer]:  # noqa: C901
        """Read the prompts of more rows, one at least, and emit their first tokens; the rows whose answers these
        complete.

        Raises:
            ValueError: more rows than are free, or one that is longer than there is room for.
            NonFinite: as of `generate`.
        """
        if len(fresh) > self.free:
            raise ValueError(f"{len(fresh)} rows where {self.free} are free")
        for row in fresh:
            if row.num_prompt + row.room > self._longest:
                whole = row.num_prompt + row.room
                raise ValueError(f"prompt {row.number}: {whole} tokens with its answer, and room for {self._longest}")
        if not self.num_going:  # whoever used session and drafter before
            self._rows = []
            self._session.reset(0)
            if self._drafter is not None:
                self._drafter.select([])
        places = [place for place, row in enumerate(self._rows) if row.done]
        places = [*places, *range(len(self._rows), len(self._rows) + len(fresh))][: len(fresh)]
        scores = self._session.prefill(places, [row.prompt for row in fresh])
        for place, row in zip(places, fresh, strict=True):
            self._rows[place : place + 1] = [row]
        try:
            verdicts = verify([NO_DRAFT] * len(fresh), scores.logits, self._params, [row.source for row in fresh])
        except NonFinite as error:
            raise self._named(error, fresh) from None
        for row, verdict in zip(fresh, verdicts, strict=True):
            assert verdict is not None and verdict.next_token is not None
            row.trace.prefill_emitted = 1
            appended = row.emit([verdict.next_token])
            if self._on_round is not None:
                self._on_round(Round(appended, 0, row=row.number))
        if self._drafter is not None and self.num_going:
            for place, row, features in zip(places, fresh, scores.features, strict=True):
                try:
                    self._drafter.begin(place, row.prompt, features[: row.num_prompt], row.tokens[0])
                except NonFinite as error:
                    error.row = row.number
                    raise
        return [row for row in fresh if row.done]

    def _leave(self) -> None:
        """Let rows leave whose answers are complete. Where shapes are to recur they idle along until half of the rows
        are done."""
        going = [place for place, row in enumerate(self._rows) if not row.done]
        count = len(going)
        if count < len(self._rows) and not (self._session.static and 2 * count > len(self._rows)):
            last = [place for place in going if place >= count]  # these move
            self._select([last.pop() if row.done else place for place, row in enumerate(self._rows[:count])])

    def _select(self, places: Sequence[int]) -> None:
        """Go on with the rows at these places only."""
        self._rows = [self._rows[place] for place in places]
        self._session.select(places)
        if self._drafter is not None:
            self._drafter.select(places)

    @torch.inference_mode()
    def round(self) -> list[RowAnswer]:
        """Draft, score, verify, commit, of one row at least that goes on; the rows whose answers are complete then."""
        self._leave()
        rows, session, drafter = self._rows, self._session, self._drafter
        sources = [row.source for row in rows]
        try:
            trees = self._draft(sources)
            scores = read(session, [row.tokens[-1] for row in rows], trees)
            verdicts = verify(trees, scores.logits, self._params, sources)
        except NonFinite as error:
            raise self._named(error, rows) from None
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
        if drafter is not None and any(outcome is not None for outcome in outcomes):
            drafter.advance(outcomes)
        return [row for row, tree in zip(rows, trees, strict=True) if tree is not None and row.done]

    def _draft(self, sources: Sequence[Source]) -> list[DraftTree | None]:
        """What each row drafts; None where its answer is complete."""
        # A draft may not outrun the context: node positions go up to kept + depth. Nor is there any use in drafting
        # past the last token wanted, whose value the round's own token gives.
        limits = [
            0 if row.done else min(row.room - len(row.tokens) - 1, self._limit - row.num_read - 1, self._max_nodes)
            for row in self._rows
        ]
        trees: Sequence[DraftTree] = [NO_DRAFT] * len(limits)
        if self._drafter is not None and max(limits) > 0:
            trees = self._drafter.propose(limits, self._params, sources)
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

    def _named(self, error: NonFinite, rows: Sequence[RowAnswer]) -> NonFinite:
        """The error of one of these rows, which tells where the row stands and which prompt it is of; it is the
        target's unless another model is named."""
        row = rows[error.row or 0]
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
