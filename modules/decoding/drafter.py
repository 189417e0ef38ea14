"""Interface of drafters: each proposes drafts for rows of sequences and takes in the target's verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import Source
from draftsmith.modules.types import SamplingParams


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


class Drafter(Protocol):
    """Proposes drafts for rows of sequences, each as if it were alone.

    aux_layers: features of the target that it reads (`targets.base.CausalLM.session`). `learners` may be missing.
    """

    aux_layers: tuple[int, ...]

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

    aux_layers: tuple[int, ...] = ()

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
