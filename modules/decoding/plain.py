"""The target alone: prompts that are answered together, in rows, each as if it were alone.

A row's lengths, random numbers and counts do not depend on the rows beside it, nor on when they begin and end. A
finished row makes room for the next prompt at once (iteration-level scheduling, Yu et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Source, can_choose_ahead, choose_ahead, choose_each, skip_ahead
from draftsmith.modules.targets.base import CausalLM, ModelInfo, Session, check_ids
from draftsmith.modules.types import InputError, SamplingParams, check_range

# A round without a draft.
ALONE = DecodeStep(0, 0, 1, 0)
# A GPU runs so many rounds before the host looks at their tokens. A row that ends among them idles through the rest.
ROUNDS_TOGETHER = 8
# While prompts wait, one in so many rows stays free until all of these are: their prompts are then read together.
GROUP_SHARE = 16


def room_for(prompt: Sequence[int], max_new_tokens: int, info: ModelInfo) -> int:
    """Return how many tokens may follow the prompt in the target's context. Raises InputError, see `generate_one`."""
    limit = info.max_position
    if not 0 < len(prompt) < limit:
        expected = f"1 to {limit - 1}, the target's context"
        raise InputError("prompt", f"{len(prompt)} tokens", expected, "Shorten the prompt.")
    check_ids(prompt, info.vocab_size)
    check_range("max_new_tokens", max_new_tokens, 1)
    return min(max_new_tokens, limit - len(prompt))


class PromptAnswer:
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
        """info: of the target. Raises InputError, see `generate_one`."""
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


@contextmanager
def of_prompts(answers: Sequence[PromptAnswer]) -> Iterator[None]:
    """Add the prompt's number, the position in its text and the model (default: the target) to a row's NonFinite."""
    try:
        yield
    except NonFinite as error:
        answer = answers[error.row or 0]
        error.row, error.model = answer.number, error.model or "target"
        if error.position is not None:
            error.position += len(answer.prompt) + len(answer.tokens)
        raise


def extend_answers(session: Session, answers: Sequence[PromptAnswer], params: SamplingParams) -> Sequence[PromptAnswer]:
    """Let the target choose the next token of every answer, on a GPU the next few. Returns those that finished.

    session: has a row for each answer, and has read all but its last token.
    """
    active = [place for place, answer in enumerate(answers) if not answer.done]
    logits = session.extend([[] if answer.done else answer.tokens[-1:] for answer in answers]).logits[:, 0]  # [B, V]
    if session.static and can_choose_ahead(params, sources := [answer.source for answer in answers]):
        count = min(ROUNDS_TOGETHER, max(answers[place].room - len(answers[place].tokens) for place in active))
        lengths = session.lengths
        ahead = choose_ahead(logits, lambda ids, _: session.extend(ids[:, None]).logits[:, 0], count, params, sources)
        tokens_of = torch.stack([tokens for tokens, _ in ahead], 1).tolist()  # [B, count]
        chosen = [tokens_of[place] for place in active]
        skip_ahead(count, params, sources)
        # Finished rows have read along.
        session.keep([0 if answer.done else own + count - 1 for answer, own in zip(answers, lengths, strict=True)])
    else:
        rows = logits if len(active) == len(logits) else logits[active]
        try:
            chosen = [[token] for token in choose_each(rows, params, [answers[place].source for place in active])]
        except NonFinite as error:
            error.row = active[error.row or 0]
            raise

    finished: list[PromptAnswer] = []
    for place, tokens in zip(active, chosen, strict=True):
        answer, usable = answers[place], tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
        answer.trace.steps += [ALONE] * len(answer.emit(usable))
        if answer.done:
            finished.append(answer)
        elif len(usable) < len(tokens):
            raise NonFinite("logits" if params.greedy else "probabilities", row=place)
    return finished


class RowPool:
    """Rows that are answered together, each from its admission until its answer is finished.

    Rows have the same places here and in the session. The place of a finished row goes to the next admitted row, or
    else to one of the last rows (`_drop_finished`).
    """

    def __init__(
        self,
        target: CausalLM,
        params: SamplingParams,
        rows: int,
        longest: int,
        session: Session | None = None,
    ):
        """rows: most rows at a time. longest: most tokens of a prompt and answer. session: one with this room, to
        reuse; None makes one."""
        self._session = target.session(rows, min(longest, target.info.max_position) + 1) if session is None else session
        self._params, self._size, self._longest = params, min(rows, self._session.most_rows), longest
        self._rows: list[PromptAnswer] = []
        # Some row may be finished; saves looking in every round.
        self._finished = False

    @property
    def num_active(self) -> int:
        """Number of unfinished rows."""
        return sum(not row.done for row in self._rows)

    @property
    def num_free(self) -> int:
        """Number of rows that may be admitted now."""
        return self._size - self.num_active

    def run(self, waiting: Iterable[PromptAnswer]) -> Iterator[PromptAnswer]:
        """Answer all rows, admitting each when there is room for it, and yield them as they finish."""
        coming, group = iter(waiting), max(1, self._size // GROUP_SHARE)
        while True:
            while (free := self.num_free) >= group and (fresh := list(islice(coming, free))):
                yield from self.admit(fresh)
            if not self.num_active:
                return
            yield from self.round()

    @torch.inference_mode()
    def admit(self, fresh: Sequence[PromptAnswer]) -> list[PromptAnswer]:
        """Read the prompts of new rows (at least one), emit their first tokens, and return the rows that finished.

        Raises:
            ValueError: more rows than are free, or a row longer than there is room for.
            NonFinite: see `generate_one`.
        """
        if len(fresh) > self.num_free:
            raise ValueError(f"{len(fresh)} rows where {self.num_free} are free")
        for row in fresh:
            if (whole := len(row.prompt) + row.room) > self._longest:
                raise ValueError(f"prompt {row.number}: {whole} tokens with its answer, and room for {self._longest}")
        # The session may hold rows of an earlier use.
        if not self.num_active:
            self._rows = []
            self._session.reset(0)

        # The target reads the prompts in free places, and its own tokens are the first ones.
        free = [place for place, row in enumerate(self._rows) if row.done]
        places = [*free, *range(len(self._rows), len(self._rows) + len(fresh))][: len(fresh)]
        logits = self._session.prefill(places, [row.prompt for row in fresh])
        with of_prompts(fresh):
            chosen = choose_each(logits, self._params, [row.source for row in fresh])
        for place, row, token in zip(places, fresh, chosen, strict=True):
            self._rows[place : place + 1] = [row]
            row.trace.prefill_emitted = 1
            row.emit([token])
        finished = [row for row in fresh if row.done]
        self._finished = self._finished or bool(finished)
        return finished

    @torch.inference_mode()
    def round(self) -> Sequence[PromptAnswer]:
        """Run one round for all active rows (at least one), on a GPU several; return the rows that finished."""
        if self._finished:
            self._drop_finished()
        with of_prompts(self._rows):
            finished = extend_answers(self._session, self._rows, self._params)
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
