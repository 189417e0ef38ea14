"""Interfaces of the decoder: a drafter proposes, a stop policy ends chains, the target verifies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.typical import Typical
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import Source
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens. A chain is the tree with parents -1, 0, 1, ...

    parents: parents[i] < i; -1 is the root, the last emitted token, which the target has not read yet.
    draft_prob: of a drawn chain: the distribution [V] that each of the N tokens was drawn from (after temperature,
        top-k and top-p), also as one tensor [N, V]; None if nodes were chosen deterministically (greedy, top-k
        children, lookups).
    drawn: of a drawn tree: node -> [V], the distribution from which its children were drawn one after the other,
        without replacement.
    last_unread: the target does not read the last token of a chain. That token is verified by the row before it, and a
        round that accepts everything has no bonus token: its last drafted token becomes the next root (PEARL).
    values: scores by which nodes were chosen, if any (EAGLE-2: log-probability of the path).
    typical: accept by this rule instead of the exact one, which changes the output; only for chosen nodes.
    num_drafted: tokens drafted in this round, if these are not the nodes: PEARL drafts ahead, and counts tokens in the
        round that drafts them. None: the number of nodes.
    draft_calls: forward passes of the drafter.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_prob: Tensor | Sequence[Tensor] | None = None
    drawn: Mapping[int, Tensor] | None = None
    last_unread: bool = False
    values: tuple[float, ...] | None = None
    typical: Typical | None = None
    num_drafted: int | None = None
    draft_calls: int = 0

    @property
    def num_read(self) -> int:
        """Number of nodes that the target reads."""
        return len(self.tokens) - self.last_unread

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.tokens))


@functools.cache
def chain_parents(count: int) -> tuple[int, ...]:
    """Return the parents of a chain with this many nodes."""
    return tuple(range(-1, count - 1))


NO_DRAFT = DraftTree((), ())


@dataclass(frozen=True)
class Verdict:
    """Decision of the target: indices of the accepted nodes from the root down, then its own token.

    next_token is None only if a chain with `last_unread` was accepted to its end.
    """

    path: tuple[int, ...]
    next_token: int | None


@dataclass(frozen=True)
class Outcome:
    """Result of a round, for the row's drafter.

    emitted: accepted tokens, then the target's own token if there is one.
    features: [len(emitted), F] of the root and of the accepted tokens that were read; row i predicts emitted[i].
    logits: [N + 1, V] of the root and of all N nodes that the target read, rejected ones too.
    """

    emitted: tuple[int, ...]
    num_accepted: int
    features: Tensor
    logits: Tensor


@dataclass(eq=False)
class DraftedStep:
    """Tokens that R rows drafted in one step, for computations that are made once for all rows.

    rows: which of the B rows drafted. all_states [B, H], all_logits [B, V]: of every row. draft_prob: [R, V] or None.
    """

    rows: Sequence[int]
    drafted: Sequence[int]
    all_states: Tensor
    all_logits: Tensor
    draft_prob: Tensor | None
    _results: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[DraftedStep], Any]) -> Any:
        """Return make(self), computed when this key is first asked for."""
        if key not in self._results:
            self._results[key] = make(self)
        return self._results[key]

    @property
    def tokens(self) -> Tensor:
        """Drafted tokens, int64 [R]."""
        return self.once("tokens", lambda _: torch.tensor(self.drafted, device=self.all_logits.device))

    @property
    def states(self) -> Tensor:
        """States of the rows that drafted, [R, H]."""
        return self.once("states", lambda _: self._own(self.all_states))

    @property
    def logits(self) -> Tensor:
        """Logits of the rows that drafted, [R, V]."""
        return self.once("logits", lambda _: self._own(self.all_logits))

    def _own(self, values: Tensor) -> Tensor:
        return values if len(values) == len(self.rows) else values[list(self.rows)]


# Not frozen: that would make it ten times slower, and one is made for every drafted token.
@dataclass(slots=True)
class DraftView:
    """State of a draft right after its n-th token, as a stop policy sees it.

    The forward that gave `logits` read the token BEFORE the n-th. So `hidden` predicts `token`, and for n >= 2 it is
    also the drafter's state once it has read drafted token n - 1.
    """

    num_drafted: int
    token: int
    states: Tensor  # [1, H] the drafter's hidden state after its final norm
    logits: Tensor  # [V] raw draft logits, before temperature
    draft_prob: Tensor | None  # [V] the distribution `token` was drawn from; None when greedy
    temperature: float = 0.0  # of that distribution; 0 when greedy
    context: Sequence[int] = ()  # all tokens before this round's draft
    step: DraftedStep | None = None  # the same step of all rows of a batch, with this row at `place`
    place: int = 0
    softmax: Tensor | None = None  # [V] of the logits of a greedy draft, filled by `confidence`
    log_q: float | None = None  # of the token, filled by `confidence`

    @property
    def hidden(self) -> Tensor:
        """State [H]. Sliced on demand: most policies never read it."""
        return self.states[0]


class StopPolicy(Protocol):
    """Decides when a chain is long enough.

    The token that a policy is shown stays in the draft: dropping it because of its value would bias the output.
    """

    max_drafted: int
    learners: Sequence[Learner] = ()

    def reset(self) -> None:
        """Begin a new prompt."""
        return None

    def start_round(self) -> None:
        """Begin a new draft."""
        return None

    def should_stop(self, view: DraftView) -> bool:
        """Return whether `view.token` is to be the draft's last."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in the verdict on the round's draft."""
        return None


class Drafter(Protocol):
    """Proposes drafts for rows of sequences, each as if it were alone.

    capture: features of the target that it reads (`targets.base.CausalLM.session`). `learners` may be missing.
    """

    capture: tuple[int, ...]

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """Begin a new sequence in this row, or in one more behind those in use.

        prompt: T tokens, with the target's features [T, F]. first_token: emitted after it.
        """

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        """Draft for each row at most limits[b] tokens deep, after all emitted tokens; nothing for a limit below 1."""

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        """Take in the results of a round, also of rows without a draft; None for finished rows."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order, as `targets.base.Session.select`."""


class SequenceDrafter(Protocol):
    """Drafts for one sequence at a time; `EachRow` makes a `Drafter` of several."""

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """Begin a new sequence."""

    def propose(self, max_drafted: int, params: SamplingParams, source: Source) -> DraftTree:
        """Draft at most `max_drafted` (1 or more) tokens deep."""

    def advance(self, outcome: Outcome) -> None:
        """Take in the result of every round but the last."""


class EachRow:
    """A `Drafter` with one `SequenceDrafter` for each row."""

    capture: tuple[int, ...] = ()

    def __init__(self, drafters: Sequence[SequenceDrafter]):
        self.drafters = list(drafters)
        self._numbers: list[int] = []  # drafters of the rows in use
        self._idle = list(range(len(self.drafters)))

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        if row == len(self._numbers):
            self._numbers.append(self._idle.pop(0))
        self.drafters[self._numbers[row]].start(prompt, features, first_token)

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        trees = []
        for row, (number, limit) in enumerate(zip(self._numbers, limits, strict=True)):
            try:
                trees.append(self.drafters[number].propose(limit, params, sources[row]) if limit > 0 else NO_DRAFT)
            except NonFinite as error:
                error.row = row
                raise
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, (number, outcome) in enumerate(zip(self._numbers, outcomes, strict=True)):
            if outcome is not None:
                try:
                    self.drafters[number].advance(outcome)
                except NonFinite as error:
                    error.row = row
                    raise

    def select(self, rows: Sequence[int]) -> None:
        self._numbers = [self._numbers[row] for row in rows]
        self._idle = sorted(set(range(len(self.drafters))).difference(self._numbers))
