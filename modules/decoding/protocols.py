"""The seams of the decoder: a drafter proposes, a stop policy says when a chain is long enough, a source decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.typical import Typical
from draftsmith.modules.finite import blame
from draftsmith.modules.sampling import Source
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens. A chain is the tree whose parents are -1, 0, 1, ...

    parents: -1 is the root: the last emitted token, which the target has not read yet. parents[i] < i.
    draft_prob: [N, V], the distribution each token was drawn from (after temperature, top-k and top-p); None where
        nodes were chosen deterministically (greedy, top-k children, lookups).
    last_unread: the target does not read the last token of a chain. That token is verified by the row before it, and a
        round that accepts everything has no bonus token: its last drafted token becomes the next root (PEARL).
    values: what each node was chosen by, where there is such a thing (EAGLE-2: log-probability of its path).
    typical: accept by this rule in the place of the exact one, which changes the output; for trees that are chosen.
    num_drafted: tokens drafted for this round, where they are not the nodes: what is drafted ahead (PEARL) counts in
        the round that drafts it.
    draft_calls: forward passes of the drafter that it took.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_prob: Tensor | None = None
    last_unread: bool = False
    values: tuple[float, ...] | None = None
    typical: Typical | None = None
    num_drafted: int = -1
    draft_calls: int = 0

    def __post_init__(self) -> None:
        if self.num_drafted < 0:
            object.__setattr__(self, "num_drafted", len(self.tokens))

    @property
    def num_read(self) -> int:
        """Nodes that the target reads."""
        return len(self.tokens) - self.last_unread

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.tokens))


@functools.cache
def chain_parents(count: int) -> tuple[int, ...]:
    """Parents in a chain of so many nodes."""
    return tuple(range(-1, count - 1))


NO_DRAFT = DraftTree((), ())


@dataclass(frozen=True)
class Verdict:
    """What the target decided: `path` are the indices of the accepted nodes from the root down; then its own token,
    None only where a chain with `last_unread` was accepted to its end."""

    path: tuple[int, ...]
    next_token: int | None


@dataclass(frozen=True)
class Outcome:
    """A round as its drafter learns of it.

    emitted: accepted tokens, then the target's own where there is one.
    features: [len(emitted), H] of the root and of the accepted tokens that were read; row i predicts emitted[i].
    logits: [N+1, V] of the root and of all N nodes that the target read, rejected ones too.
    """

    emitted: tuple[int, ...]
    num_accepted: int
    features: Tensor
    logits: Tensor


@dataclass(eq=False)
class DraftedStep:
    """The tokens that R rows drafted in one step, side by side, for what takes a call or a transfer: it is worked out
    for all rows when it is first asked of one of their views.

    rows: of all B rows, those that drafted. states [B, H], logits [B, V]: of all; draft_prob: [R, V] or None. Else as
    of `DraftView`.
    """

    rows: Sequence[int]
    drafted: Sequence[int]
    all_states: Tensor
    all_logits: Tensor
    draft_prob: Tensor | None
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[DraftedStep], Any]) -> Any:
        """What `make` makes of this step, the first time that it is asked for by this key."""
        if key not in self._known:
            self._known[key] = make(self)
        return self._known[key]

    @property
    def tokens(self) -> Tensor:
        """[R] int64."""
        return self.once("tokens", lambda _: torch.tensor(self.drafted, device=self.all_logits.device))

    @property
    def states(self) -> Tensor:
        """[R, H]."""
        return self.once("states", lambda _: self._own(self.all_states))

    @property
    def logits(self) -> Tensor:
        """[R, V]."""
        return self.once("logits", lambda _: self._own(self.all_logits))

    def _own(self, values: Tensor) -> Tensor:
        return values if len(values) == len(self.rows) else values[list(self.rows)]


@dataclass(slots=True)  # frozen, making one takes ten times as long, and one is made a drafted token
class DraftView:
    """What a stop policy may look at, right after the n-th token of a chain was drafted.

    The forward that gave `logits` read the token BEFORE the n-th; so `hidden` predicts `token`, and for n >= 2 is also
    the state of the drafter once it has read drafted token n-1.
    """

    num_drafted: int
    token: int
    states: Tensor  # [1, H] the drafter's hidden state after its final norm
    logits: Tensor  # [V] raw draft logits, before temperature
    draft_prob: Tensor | None  # [V] the distribution `token` was drawn from; None when greedy
    temperature: float = 0.0  # of that distribution; 0 when greedy
    context: Sequence[int] = ()  # all tokens before this round's draft: the prompt, and what was emitted
    step: DraftedStep | None = None  # with the other rows' of a batch, as its row `place`
    place: int = 0
    softmax: Tensor | None = None  # [V] of the logits of a greedy draft, once someone asked (`confidence`)
    log_q: float | None = None  # of the token, once someone asked (`confidence`)

    @property
    def hidden(self) -> Tensor:
        """[H]. Taken out when asked for: most policies never do."""
        return self.states[0]


class StopPolicy(Protocol):
    """Says when a chain is long enough. It may look at drafted tokens that stay in the draft, and the drafter keeps
    the token it has just shown: dropping it because of its value would bias the output distribution. What a subclass
    leaves out does nothing."""

    max_drafted: int
    learners: Sequence[Learner] = ()

    def reset(self) -> None:
        """A new prompt begins: forget what is of the last one."""
        return None

    def start_round(self) -> None:
        """A new draft begins."""
        return None

    def should_stop(self, view: DraftView) -> bool:
        """True when `view.token` is to be the draft's last."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """The verdict on the round's draft."""
        return None


class Drafter(Protocol):
    """Proposes drafts for rows of sequences, each of which is drafted for as if it were alone.

    capture: what features of the target it reads (`targets.base.CausalLM.session`). `learners` may be missing.
    """

    capture: tuple[int, ...]

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """A new sequence in the place of this row, or in one more, behind those in use: a prompt of T tokens, the
        target's features [T, F] of it, and the first token emitted. What is learned from row to row lasts."""

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        """A draft for each row, at most limits[b] tokens deep, following everything emitted so far; none where the
        limit is below 1."""

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        """Learn of every round, those without a draft included; None for rows whose answer is complete."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order, as `targets.base.Session.select` takes it."""


class SequenceDrafter(Protocol):
    """A drafter of one sequence at a time; `EachRow` makes a `Drafter` of several."""

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """A new sequence."""

    def propose(self, max_drafted: int, params: SamplingParams, source: Source) -> DraftTree:
        """A draft of at most `max_drafted` tokens deep, 1 or more."""

    def advance(self, outcome: Outcome) -> None:
        """Learn of every round but the last."""


class EachRow:
    """A drafter of its own for each row."""

    capture: tuple[int, ...] = ()

    def __init__(self, drafters: Sequence[SequenceDrafter]):
        self.drafters = list(drafters)
        self._numbers: list[int] = []  # of those in use
        self._idle = list(range(len(self.drafters)))

    @property
    def _rows(self) -> list[SequenceDrafter]:
        return [self.drafters[number] for number in self._numbers]

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        if row == len(self._numbers):
            self._numbers.append(self._idle.pop(0))
        with blame(row=row):
            self.drafters[self._numbers[row]].start(prompt, features, first_token)

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        trees = []
        for row, (drafter, limit) in enumerate(zip(self._rows, limits, strict=True)):
            with blame(row=row):
                trees.append(drafter.propose(limit, params, sources[row]) if limit > 0 else NO_DRAFT)
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, (drafter, outcome) in enumerate(zip(self._rows, outcomes, strict=True)):
            with blame(row=row):
                if outcome is not None:
                    drafter.advance(outcome)

    def select(self, rows: Sequence[int]) -> None:
        self._numbers = [self._numbers[row] for row in rows]
        self._idle = sorted(set(range(len(self.drafters))).difference(self._numbers))
