"""Interface of drafters: each proposes drafts for rows of sequences and takes in the target's verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree
from draftsmith.modules.finite import located
from draftsmith.modules.sampling import Sampler


@dataclass(frozen=True)
class Outcome:
    """Result of a round, for the row's drafter.

    emitted: accepted tokens, then the target's own token.
    features: [len(emitted), F] of the root and of the accepted tokens; row i predicts emitted[i].
    logits: [N + 1, V] of the root and of all N nodes, rejected ones too.
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

    def propose(self, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        """Draft for each row at most limits[b] tokens deep, after all emitted tokens; nothing for a limit below 1."""

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        """Take in the results of a round, also of rows without a draft; None for finished rows."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order, as `targets.base.Session.select`."""


class SequenceDrafter(Protocol):
    """Drafts for one sequence at a time; `EachRow` makes a `Drafter` of several."""

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """Begin a new sequence."""

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        """Draft at most `max_drafted` (1 or more) tokens deep. sampler: of this sequence alone."""

    def advance(self, outcome: Outcome) -> None:
        """Take in the result of every round but the last."""


class EachRow:
    """A `Drafter` with one `SequenceDrafter` for each row."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, drafters: Sequence[SequenceDrafter]):
        self.drafters, self._used = list(drafters), list[SequenceDrafter]()

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        if row == len(self._used):
            self._used.append(next(own for own in self.drafters if own not in self._used))
        self._used[row].start(prompt, features, first_token)

    def propose(self, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        trees = [NO_DRAFT] * len(limits)
        for row, (drafter, limit) in enumerate(zip(self._used, limits, strict=True)):
            if limit > 0:
                with located(row):
                    trees[row] = drafter.propose(limit, sampler.row(row))
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, (drafter, outcome) in enumerate(zip(self._used, outcomes, strict=True)):
            if outcome is not None:
                with located(row):
                    drafter.advance(outcome)

    def select(self, rows: Sequence[int]) -> None:
        self._used = [self._used[row] for row in rows]
