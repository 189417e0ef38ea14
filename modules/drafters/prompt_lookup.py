"""Prompt lookup: draft what followed the last n tokens when they occurred before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.tree import MAX_NODES, NO_DRAFT, DraftTree, chain_parents
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.sampling import Sampler


class PromptLookupDrafter(Drafter):
    """Drafts the `k` tokens behind the most recent earlier occurrence of the last n tokens, n from `ngram` down to 1.

    Nothing is drawn, so a draft is verified as a path of chosen nodes.
    """

    def __init__(self, k: int, ngram: int):
        self.k, self.ngram = k, ngram
        self._tokens: list[int] = []
        # (n tokens) -> the place behind their last occurrence; the end of the sequence is not in it yet.
        self._places: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._tokens, self._places = [], {}
        self._append([*prompt, first_token])

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(self.ngram, end) + 1):
                self._places[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        end = len(self._tokens)
        for n in range(min(self.ngram, end), 0, -1):
            place = self._places.get(tuple(self._tokens[end - n :]))
            if place is not None:
                drafted = tuple(self._tokens[place : place + min(self.k, max_drafted)])
                return DraftTree(drafted, chain_parents(len(drafted)))
        return NO_DRAFT

    def advance(self, outcome: Outcome) -> None:
        self._append(outcome.emitted)


@dataclass(frozen=True)
class PromptLookupMethod(Method):
    """What followed the last ngram (or fewer) tokens when they last occurred, up to k tokens."""

    k: int = 10
    ngram: int = 3
    ranges: ClassVar = {"k": (1, MAX_NODES), "ngram": 1}

    def build(self, models: Models) -> Drafter:
        return PromptLookupDrafter(self.k, self.ngram)


METHODS = {"pld": PromptLookupMethod()}
