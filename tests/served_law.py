"""What two requests are answered when a server drops some of their drafted tokens, by enumeration of every draft and
verdict in float64; no code of the product.

A draft has PLACES tokens of V. Verification is that of Leviathan et al. 2023, written down anew; a dropped token's
place is drawn from all of the target's distribution.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

V, PLACES, REQUESTS = 3, 2, 2
# Suffixes of both stood in them before, and go on in several ways.
TEXTS = ((2, 0, 1, 1, 2, 0, 2, 1, 2, 0), (1, 0, 1, 0, 2, 1, 0, 1, 0))
Drafts = tuple[tuple[int, ...], ...]
Text = tuple[int, ...]


class Tables:
    """Distributions p and q [V] of every request behind every prefix of its answer."""

    def __init__(self, seed: int):
        random = np.random.default_rng(seed)
        prefixes = [prefix for n in range(PLACES + 1) for prefix in itertools.product(range(V), repeat=n)]
        keys = list(itertools.product(range(REQUESTS), prefixes))
        self.p = {key: random.dirichlet(np.full(V, 0.7)) for key in keys}
        self.q = {key: random.dirichlet(np.full(V, 0.7)) for key in keys}

    def logits(self, drafts: Drafts, place: int) -> Tensor:
        """[REQUESTS, V] of the draft at this place."""
        return torch.tensor(np.log([self.q[n, one[:place]] for n, one in enumerate(drafts)]), dtype=torch.float32)

    def drafts(self) -> Iterator[tuple[Drafts, float]]:
        """All of them, with their probabilities."""
        one = list(itertools.product(range(V), repeat=PLACES))
        for drafts in itertools.product(one, repeat=REQUESTS):
            prob = np.prod([self.q[n, y[:k]][y[k]] for n, y in enumerate(drafts) for k in range(PLACES)])
            yield drafts, float(prob)

    def texts(self, request: int, prefix: Text = ()) -> Iterator[tuple[Text, float]]:
        """The target's, of PLACES + 1 tokens, that go on from this prefix."""
        if len(prefix) == PLACES + 1:
            yield prefix, 1.0
            return
        for token, prob in enumerate(self.p[request, prefix]):
            for text, rest in self.texts(request, (*prefix, token)):
                yield text, prob * rest

    def answers(self, request: int, kept: Text, prefix: Text = ()) -> Iterator[tuple[Text, float]]:
        """What a draft of which these tokens were verified becomes, with the target's text behind."""
        if len(prefix) == len(kept):
            yield from self.texts(request, prefix)
            return
        p, q, token = self.p[request, prefix], self.q[request, prefix], kept[len(prefix)]
        accepted = min(1.0, p[token] / q[token])
        for text, prob in self.answers(request, kept, (*prefix, token)):
            yield text, accepted * prob
        more = np.maximum(p - q, 0)
        for other in np.flatnonzero(more):
            for text, prob in self.texts(request, (*prefix, int(other))):
                yield text, (1 - accepted) * more[other] / more.sum() * prob


def bias(tables: Tables, kept: Callable[[Drafts], Sequence[int]]) -> float:
    """Total variation between what both requests are answered and what the target says. kept: how many tokens of each
    are verified."""
    found: dict[tuple[Text, Text], float] = defaultdict(float)
    for drafts, weight in tables.drafts():
        count = kept(drafts)
        first, second = (list(tables.answers(n, y[: count[n]])) for n, y in enumerate(drafts))
        for (one, a), (other, b) in itertools.product(first, second):
            found[one, other] += weight * a * b
    for (one, a), (other, b) in itertools.product(tables.texts(0), tables.texts(1)):
        found[one, other] -= a * b
    return sum(map(abs, found.values())) / 2
