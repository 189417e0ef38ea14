"""Base of drafters that serve several rows with one model: texts, stop policies, limits, results of rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.chain import OnToken, Step, draft_chains
from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.stop import Learner, StopPolicy
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, DynamicTree, StaticTree
from draftsmith.modules.drafters.growth import Expand, Level, grow_dynamic, grow_static
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.layers import MOST_POSITIONS
from draftsmith.modules.sampling import Sampler, Source
from draftsmith.modules.types import SamplingParams


@dataclass
class DraftedRow:
    """A row that is drafted for.

    number: of its policy. tokens: all committed ones; a draft model has read the first `read` of them. features: [T, F]
    of the target, not yet read by a head. tree: this round's draft, until its result.
    """

    number: int
    stop: StopPolicy
    tokens: list[int]
    features: Tensor
    read: int = 0
    tree: DraftTree = NO_DRAFT


class RowDrafter(ABC):
    """A `Drafter` apart from its model.

    needs_features: it reads features of the model it drafts for. model: its name in errors. end_ids: tokens that end a
    chain. on_token: called with the row and the view of every drafted token of a chain. shape: of its trees, if it
    drafts any. rules: for each row, how far its dynamic tree grows and how many of its nodes are verified.
    """

    shape: StaticTree | DynamicTree | None = None
    rules: Sequence[TreeRule] | None = None
    capture: tuple[int, ...] = ()
    needs_features = True
    end_ids: Collection[int] = ()
    on_token: OnToken | None = None
    model: str

    def __init__(
        self, stops: Sequence[StopPolicy], longest_text: int = MOST_POSITIONS, longest_draft: int = MOST_POSITIONS
    ):
        """stops: a policy for each row that it can draft for. longest_text: most tokens that a draft may end at."""
        self.stops, self._longest_text, self._longest_draft = list(stops), longest_text, longest_draft
        self._rows: list[DraftedRow] = []  # in use
        # Policies without a row.
        self._idle = list(range(len(self.stops)))

    @property
    def learners(self) -> Sequence[Learner]:
        of_stops = (learner for stop in self.stops for learner in stop.learners)
        return [*of_stops, *(learner for rule in self.rules or () for learner in rule.learners)]

    @abstractmethod
    def _draft(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> Sequence[DraftTree]:
        """Read what is unread of the rows with a limit above 0 (at least one), and draft for them."""

    def _chains(
        self,
        logits: Tensor,
        states: Tensor,
        step: Step,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        """Draft chains by the rows' policies (`draft_chains`)."""
        stops, contexts = [row.stop for row in self._rows], [row.tokens for row in self._rows]
        sampler = Sampler(params, sources)
        return draft_chains(logits, states, step, stops, limits, sampler, contexts, self.end_ids, self.on_token)

    def _grown(
        self,
        root: Level,
        expand: Expand,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        """Grow trees of the drafter's shape."""
        if isinstance(self.shape, StaticTree):
            return grow_static(self.shape, root, expand, limits, params, sources)
        assert self.shape is not None
        rules = None if self.rules is None else [self.rules[row.number] for row in self._rows]
        return grow_dynamic(self.shape, root, expand, limits, rules)

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        number = self._idle.pop(0) if row == len(self._rows) else self._rows[row].number
        stop = self.stops[number]
        stop.reset()
        self._rows[row : row + 1] = [DraftedRow(number, stop, [*prompt, first_token], features)]

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        texts = [len(row.tokens) for row in self._rows]
        limits = [
            min(limit, self._longest_draft, self._longest_text - text)
            for limit, text in zip(limits, texts, strict=True)
        ]
        trees = [NO_DRAFT] * len(limits)
        if max(limits) > 0:
            try:
                trees = list(self._draft(limits, params, sources))
            except NonFinite as error:
                error.model = error.model or self.model
                raise
        for row, tree in zip(self._rows, trees, strict=True):
            row.tree = tree
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for number, (row, outcome) in enumerate(zip(self._rows, outcomes, strict=True)):
            if outcome is not None:
                # At the context's end a round may have no draft, which the rule learns nothing from.
                if self.rules is not None and row.tree.tokens:
                    rule = self.rules[row.number]
                    rule.observe(len(row.tree.tokens), row.tree.draft_calls, outcome.num_accepted)
                self.commit(number, outcome.emitted, outcome.features)
                row.stop.observe(len(row.tree.tokens), outcome.num_accepted)
            row.tree = NO_DRAFT

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._idle = sorted(set(range(len(self.stops))).difference(row.number for row in self._rows))

    def commit(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """Append T tokens to a row; features [T, F] of the tokens before each."""
        own = self._rows[row]
        own.tokens += tokens
        if self.needs_features:
            assert features is not None and len(features) == len(tokens)
            own.features = torch.cat([own.features, features]) if len(own.features) else features
