"""The decoder's only loop: draft, score, verify, commit, for any number of rows.

Each row is decoded as if it were alone: its drafts, lengths, random numbers and counts do not depend on the rows beside
it, nor on when they begin and end. A finished row makes room for the next prompt at once (iteration-level scheduling,
Yu et al. 2022). Autoregressive decoding is the loop without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import MAX_NODES, NO_DRAFT, DraftTree
from draftsmith.modules.decoding.verify import Verdict, verify
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Sampler, Source
from draftsmith.modules.targets.base import CausalLM, ModelInfo, Session, check_ids
from draftsmith.modules.types import InputError, SamplingParams, check_range


@dataclass(frozen=True)
class Generation:
    """Emitted tokens [N] and their cost. `ended`: the last one is an end token."""

    tokens: list[int]
    trace: DecodeTrace
    ended: bool


@dataclass(frozen=True)
class Round:
    """A finished round of one row, for `on_round`.

    tokens: emitted, the first `num_accepted` of them drafted. row: number of the prompt.
    tree, verdict, step, logits: the draft, the target's decision, the counts, and the target's logits [N + 1, V], whose
        row 0 scores the root's children. All are None for the prefill, which emits the first token.
    """

    tokens: list[int]
    num_accepted: int
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    step: DecodeStep | None = None
    logits: Tensor | None = None
    row: int = 0


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding that do not change the distribution of the tokens.

    on_round: called after every round of every row.
    session: a session of the target to reuse, for its CUDA graphs, with room for these rows and the features that the
        drafter reads; None makes one.
    max_nodes: most drafted tokens of a row that the target scores in one call.
    """

    on_round: Callable[[Round], None] | None = None
    session: Session | None = None
    max_nodes: int = MAX_NODES


DEFAULTS = DecodeOptions()
# A round without a draft.
ALONE = DecodeStep(0, 0, 1, 0)
# Without a drafter a GPU runs so many rounds before the host looks at their tokens. A row that ends among them idles
# through the rest.
ROUNDS_TOGETHER = 8
# While prompts wait, one in so many rows stays free until all of these are: their prompts are then read together.
GROUP_SHARE = 16


def generate(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    sources: Sequence[Source],
    eos_ids: Sequence[int] | None = None,
    options: DecodeOptions = DEFAULTS,
) -> list[Generation]:
    """Generate up to `max_new_tokens` for each prompt. The output follows the target's distribution for any drafter.

    sources: random numbers of each prompt, whatever the rows beside it.
    eos_ids: tokens that end an answer (and are kept in it); None takes the target's, () never ends.

    Raises:
        InputError: a prompt that is empty, has tokens unknown to the target, or leaves no room in its context.
        NonFinite: a model's numbers choose no token; the error's row is the prompt's number.
    """
    rows = [
        RowAnswer(target.info, prompt, max_new_tokens, source, eos_ids, number)
        for number, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
    ]
    longest = max(len(row.prompt) + row.room for row in rows)
    for _ in RowPool(target, drafter, params, len(rows), longest, options).run(rows):
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
    options: DecodeOptions = DEFAULTS,
) -> Generation:
    """Generate for a single prompt, see `generate`."""
    return generate(target, drafter, [prompt], params, max_new_tokens, [source], eos_ids, options)[0]


def room_for(prompt: Sequence[int], max_new_tokens: int, info: ModelInfo) -> int:
    """Return how many tokens may follow the prompt in the target's context. Raises InputError, see `generate`."""
    limit = info.max_position
    if not 0 < len(prompt) < limit:
        expected = f"1 to {limit - 1}, the target's context"
        raise InputError("prompt", f"{len(prompt)} tokens", expected, "Shorten the prompt.")
    check_ids(prompt, info.vocab_size)
    check_range("max_new_tokens", max_new_tokens, 1)
    return min(max_new_tokens, limit - len(prompt))


class RowAnswer:
    """The answer to one prompt: emitted tokens, their cost, and whether it is finished.

    ends: tokens that end it. room: most tokens. number: of the prompt, from 0. source: its random numbers.
    """

    def __init__(
        self,
        info: ModelInfo,
        prompt: Sequence[int],
        max_new_tokens: int,
        source: Source,
        eos_ids: Sequence[int] | None = None,
        number: int = 0,
    ):
        """info: of the target. Raises InputError, see `generate`."""
        self.ends = frozenset(info.eos_ids if eos_ids is None else eos_ids)
        self.room, self.number = room_for(prompt, max_new_tokens, info), number
        self.prompt, self.source, self.trace = prompt, source, DecodeTrace()
        self.tokens: list[int] = []
        self.ended = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.tokens) >= self.room

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first end token and the limit, and return the appended ones."""
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
    """Rows that are decoded together, each from its admission until its answer is finished.

    Rows have the same places here, in the session and in the drafter. The place of a finished row goes to the next
    admitted row, or else to one of the last rows (`_drop_finished`).
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        params: SamplingParams,
        rows: int,
        longest: int,
        options: DecodeOptions = DEFAULTS,
    ):
        """rows: most rows at a time; the drafter needs room for them. longest: most tokens of a prompt and answer."""
        aux_layers, nodes = () if drafter is None else drafter.aux_layers, options.max_nodes
        session = options.session
        # With room for everything kept, and one round's root and nodes.
        if session is None:
            session = target.session(rows, min(longest, target.info.max_position) + nodes + 1, aux_layers)
        if session.aux_layers != aux_layers:
            raise ValueError(f"session: captures {session.aux_layers}, and the drafter reads {aux_layers}")
        self._session, self._drafter, self._params, self._on_round = session, drafter, params, options.on_round
        self._size, self._longest, self._max_nodes = rows, longest, nodes
        self._rows: list[RowAnswer] = []
        # Some row may be finished; saves looking in every round.
        self._finished = False

    @property
    def num_active(self) -> int:
        """Number of unfinished rows."""
        return sum(not row.done for row in self._rows)

    @property
    def num_free(self) -> int:
        """Number of rows that may be admitted now."""
        active = self.num_active
        return self._size - active if self._session.joins or not active else 0

    def run(self, waiting: Iterable[RowAnswer]) -> Iterator[RowAnswer]:
        """Answer all rows, admitting each when there is room for it, and yield them as they finish."""
        coming, group = iter(waiting), max(1, self._size // GROUP_SHARE)
        while True:
            while (free := self.num_free) >= group and (fresh := list(islice(coming, free))):
                yield from self.admit(fresh)
            if not self.num_active:
                return
            yield from self.round()

    @torch.inference_mode()
    def admit(self, fresh: Sequence[RowAnswer]) -> list[RowAnswer]:
        """Read the prompts of new rows (at least one), emit their first tokens, and return the rows that finished.

        Raises:
            ValueError: more rows than are free, or a row longer than there is room for.
            NonFinite: see `generate`.
        """
        if len(fresh) > self.num_free:
            raise ValueError(f"{len(fresh)} rows where {self.num_free} are free")
        for row in fresh:
            if (whole := len(row.prompt) + row.room) > self._longest:
                raise ValueError(f"prompt {row.number}: {whole} tokens with its answer, and room for {self._longest}")
        # Session and drafter may hold rows of an earlier use.
        if not self.num_active:
            self._rows = []
            self._session.reset(0)
            if self._drafter is not None:
                self._drafter.select([])

        # The target reads the prompts in free places, and its own tokens are the first ones.
        free = [place for place, row in enumerate(self._rows) if row.done]
        places = [*free, *range(len(self._rows), len(self._rows) + len(fresh))][: len(fresh)]
        scores = self._session.prefill(places, [row.prompt for row in fresh])
        with _of_prompts(fresh):
            chosen = Sampler(self._params, [row.source for row in fresh]).choose(scores.logits[:, 0], range(len(fresh)))
        for place, row, token in zip(places, fresh, chosen, strict=True):
            self._rows[place : place + 1] = [row]
            row.trace.prefill_emitted = 1
            appended = row.emit([token])
            if self._on_round is not None:
                self._on_round(Round(appended, 0, row=row.number))

        if self._drafter is not None and self.num_active:
            for place, row, features in zip(places, fresh, scores.features, strict=True):
                with _of_prompts([row]):
                    self._drafter.begin(place, row.prompt, features[: len(row.prompt)], row.tokens[0])
        finished = [row for row in fresh if row.done]
        self._finished = self._finished or bool(finished)
        return finished

    @torch.inference_mode()
    def round(self) -> list[RowAnswer]:
        """Run one round for all active rows (at least one) and return the rows that finished.

        A GPU runs several at once if neither a drafter nor `on_round` looks at each.
        """
        if self._finished:
            self._drop_finished()
        with _of_prompts(self._rows):
            return self._rounds_alone() if self._drafter is None and self._on_round is None else self._one_round()

    def _one_round(self) -> list[RowAnswer]:
        """Draft, score, verify and commit, for all active rows."""
        rows, session, drafter = self._rows, self._session, self._drafter
        sampler = Sampler(self._params, [row.source for row in rows])

        # Draft, but not past the last token wanted, whose value the round's own token gives. (The context has room for
        # an answer, so no node outruns it.) Finished rows idle along.
        limits = [0 if row.done else min(row.room - len(row.tokens) - 1, self._max_nodes) for row in rows]
        drafts = [NO_DRAFT] * len(rows)
        if drafter is not None and max(limits) > 0:
            drafts = drafter.propose(limits, sampler)
        trees = [None if row.done else draft for row, draft in zip(rows, drafts, strict=True)]

        # Score every row's root and the nodes of its tree, in one call of the target.
        fed, parents, chains = list[list[int]](), list[list[int]](), True
        for row, tree in zip(rows, trees, strict=True):
            fed.append([] if tree is None else [row.tokens[-1], *tree.tokens])
            parents.append([] if tree is None else [-1, *[parent + 1 for parent in tree.parents]])
            chains = chains and (tree is None or tree.is_chain)
        scores = session.extend(fed, None if chains else parents, logits_to_keep=max(map(len, fed)))
        verdicts = verify(trees, scores.logits, sampler)

        # Commit: keep the root and the accepted nodes in the target's cache, emit, and tell the drafter.
        lengths = list(session.lengths)
        slots: list[Sequence[int]] = [()] * len(rows)
        outcomes: list[Outcome | None] = [None] * len(rows)
        finished = []
        for place, (row, tree, verdict) in enumerate(zip(rows, trees, verdicts, strict=True)):
            if tree is None or verdict is None:
                continue
            # The slots from here on hold the nodes.
            first = lengths[place] = lengths[place] - len(tree.tokens)
            slots[place] = [first + node for node in verdict.path]

            emitted = [*map(tree.tokens.__getitem__, verdict.path), verdict.next_token]
            appended, num_accepted = row.emit(emitted), len(verdict.path)
            step = DecodeStep(len(tree.tokens), num_accepted, len(appended), tree.draft_calls if tree.tokens else 0)
            row.trace.steps.append(step)

            if row.done:
                finished.append(row)
            if self._on_round is None and (drafter is None or row.done):
                continue  # what follows is for the drafter and on_round
            # Of the root and the nodes; what lies behind them is undefined.
            logits, features = scores.logits[place, : len(tree.tokens) + 1], scores.features[place]
            if self._on_round is not None:
                accepted = min(num_accepted, len(appended))
                self._on_round(Round(appended, accepted, tree, verdict, step, logits, row.number))
            if row.done or drafter is None:
                continue
            outcomes[place] = Outcome(tuple(emitted), num_accepted, _of_path(features, verdict.path), logits)
        session.keep(lengths, slots)
        if drafter is not None and any(outcomes):
            drafter.advance(outcomes)
        self._finished = self._finished or bool(finished)
        return finished

    def _rounds_alone(self) -> list[RowAnswer]:
        """Let the target choose the next token of every row, on a GPU the next few."""
        rows, session, sampler = self._rows, self._session, Sampler(self._params, [row.source for row in self._rows])
        lengths, active = session.lengths, [place for place, row in enumerate(rows) if not row.done]
        logits = session.extend([[] if row.done else row.tokens[-1:] for row in rows]).logits[:, 0]  # [B, V]
        if session.static and sampler.seeded:
            count = min(ROUNDS_TOGETHER, max(rows[place].room - len(rows[place].tokens) for place in active))
            counts = [count] * len(rows)
            ahead = sampler.ahead(logits, lambda ids, _: session.extend(ids).logits[:, 0], counts)
            tokens_of = torch.stack([tokens for tokens, _ in ahead], 1).tolist()  # [B, count]
            chosen = [tokens_of[place] for place in active]
            sampler.skip(counts)
            # Finished rows have read along.
            session.keep([0 if row.done else length + count for row, length in zip(rows, lengths, strict=True)])
        else:
            chosen = [[token] for token in sampler.choose(logits, active)]

        finished: list[RowAnswer] = []
        for place, tokens in zip(active, chosen, strict=True):
            row, usable = rows[place], tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
            row.trace.steps += [ALONE] * len(row.emit(usable))
            if row.done:
                finished.append(row)
            elif len(usable) < len(tokens):
                raise NonFinite("logits" if sampler.greedy else "probabilities", row=place)
        self._finished = self._finished or bool(finished)
        return finished

    def _drop_finished(self) -> None:
        """Drop finished rows. With static shapes they idle along until half of the rows are finished."""
        active = [place for place, row in enumerate(self._rows) if not row.done]
        count = len(active)
        self._finished = count < len(self._rows)
        if not self._finished or (self._session.static and 2 * count > len(self._rows)):
            return
        # These move to the places of finished rows.
        last = [place for place in active if place >= count]
        places = [last.pop() if row.done else place for place, row in enumerate(self._rows[:count])]
        self._rows, self._finished = [self._rows[place] for place in places], False
        self._session.select(places)
        if self._drafter is not None:
            self._drafter.select(places)


def _of_path(features: Tensor, path: Sequence[int]) -> Tensor:
    """Select the states of the root and of an accepted path from those of the root and all nodes."""
    count = len(path) + 1
    if path and path[-1] != count - 2:
        return features[[0, *(node + 1 for node in path)]]
    return features[:count]  # a contiguous path is a slice, which costs nothing


@contextmanager
def _of_prompts(rows: Sequence[RowAnswer]) -> Iterator[None]:
    """Add the prompt's number, the position in its text and the model (default: the target) to a row's NonFinite."""
    try:
        yield
    except NonFinite as error:
        row = rows[error.row or 0]
        error.row, error.model = row.number, error.model or "target"
        if error.position is not None:
            error.position += len(row.prompt) + len(row.tokens)
        raise
