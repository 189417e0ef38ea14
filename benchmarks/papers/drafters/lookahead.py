"""Lookahead decoding: the target guesses n-grams beside its own work (Fu et al. 2024)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.tree import MAX_NODES, DraftTree
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.finite import checked
from draftsmith.modules.sampling import Sampler, best_tokens
from draftsmith.modules.types import check_range


class LookaheadDrafter(Drafter):
    """Drafts n-grams that continue the last token, from guesses that ride on every target call (Jacobi iteration).

    The guesses are a window of `window` columns and `ngram - 1` rows, which each call moves on; a column completes an
    n-gram. The window is a tree: its first row is a chain behind the root, and each column goes down from there. So it
    is scored by the same call and mask as the drafts, its positions are its depths, and a guess that the target happens
    to choose may be accepted like any node. Nodes are chosen, never drawn.
    """

    def __init__(self, window: int, ngram: int, max_ngrams: int):
        """max_ngrams: most n-grams drafted a round, and most kept for one token (G in the paper)."""
        self.window, self.ngram, self.max_ngrams = window, ngram, max_ngrams

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._last = first_token
        # The first guesses are the prompt's last tokens, in turn: any will do, and these are in the right language.
        guesses = [*prompt, first_token]
        self._rows = [
            [guesses[-1 - (row + column) % len(guesses)] for column in range(self.window)]
            for row in range(self.ngram - 1)
        ]
        self._pool: defaultdict[int, OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}

        def add(parent: int, token: int) -> int:
            """Return the node of this token under this parent: n-grams share their beginnings."""
            node = known.get((parent, token))
            if node is None:
                node = known[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            return node

        for ngram in reversed(self._pool[self._last]):
            node = -1
            for token in ngram[:max_drafted]:
                node = add(node, token)
        # The window's nodes are not shared: each stands for a place in it. With too little room there are no guesses.
        self._places: list[int] = []
        if max_drafted >= self.window + self.ngram - 2:
            # The first row is a chain.
            above = [-1, *range(len(tokens), len(tokens) + self.window - 1)]
            for row in self._rows:
                self._places = list(range(len(tokens), len(tokens) + self.window))
                tokens += row
                parents += above
                above = self._places
        return DraftTree(tuple(tokens), tuple(parents))

    def advance(self, outcome: Outcome) -> None:
        if self._places:
            rows = [node + 1 for node in self._places]
            new = checked(best_tokens(outcome.logits[rows]), model="target").tolist()
            for column, guess in enumerate(new):
                path = [row[column] for row in self._rows] + [guess]
                ngrams, following = self._pool[path[0]], tuple(path[1:])
                ngrams.pop(following, None)
                ngrams[following] = None
                if len(ngrams) > self.max_ngrams:
                    ngrams.popitem(last=False)
            # The sequence moves on by the emitted tokens: by one through the rows, by the others through the columns.
            moved = min(len(outcome.emitted) - 1, self.window - 1)
            self._rows = [[*row[moved:], *([row[-1]] * moved)] for row in (*self._rows[1:], new)]
        self._last = outcome.emitted[-1]


@dataclass(frozen=True)
class LookaheadMethod(Method):
    """Lookahead decoding (Fu et al. 2024): w columns of guesses, n-grams of n tokens, at most g of them verified."""

    w: int = 15
    n: int = 5
    g: int = 15
    ranges: ClassVar = {"w": 1, "n": 2, "g": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("(w + g) * (n - 1), nodes a round", (self.w + self.g) * (self.n - 1), high=MAX_NODES)

    def build(self, models: Models) -> Drafter:
        return LookaheadDrafter(self.w, self.n, self.g)


METHODS = {"lookahead": LookaheadMethod()}
