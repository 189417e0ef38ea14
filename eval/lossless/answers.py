"""Answers of a method by one of the decoder's loops, and what had been drafted where each of their tokens was decided.

What stands in a `Place` is known before its token is: a drafter's distribution depends on what came before, and a
policy keeps the token that it looked at. So given its place, too, a token of a lossless method follows the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from draftsmith.modules.decoding.batch import generate_batch
from draftsmith.modules.decoding.chains import BatchDrafter, BatchOutcome, Chains
from draftsmith.modules.decoding.loop import Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, RowsLM, RowsSession
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Place:
    """What had been drafted for a token: drawn from `distribution` [V], or chosen as `children`, or nothing.

    first: it was the first token of its round.
    """

    first: bool = False
    distribution: Tensor | None = None
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """tokens: with the end token, if it came. places: one a token; the first token's, the prefill's own, is empty."""

    tokens: list[int]
    places: list[Place]


class Loop(Protocol):
    """A method, run by one of the loops. `name` is single or batched."""

    name: str

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[Answer]:
        """An answer to each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class SingleLoop:
    """`modules.decoding.loop.generate`, one prompt after the other."""

    target: CausalLM
    drafter: Drafter | None
    ends: tuple[int, ...]
    name = "single"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[Answer]:
        return [self._answer(prompt, params, max_new_tokens, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _answer(self, prompt: Sequence[int], params: SamplingParams, max_new_tokens: int, seed: int) -> Answer:
        places: list[Place] = []
        made = generate(
            self.target,
            self.drafter,
            prompt,
            params,
            max_new_tokens,
            TorchSource(seed),
            self.ends,
            lambda done: places.extend(places_of(done)),
        )
        return Answer(made.tokens, places)


@dataclass(frozen=True)
class BatchedLoop:
    """`modules.decoding.batch.generate_batch`, which `eval bench --batch-size` and CUDA use."""

    target: RowsLM
    drafter: BatchDrafter | None
    ends: tuple[int, ...]
    session: RowsSession
    name = "batched"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[Answer]:
        watched = None if self.drafter is None else Watched(self.drafter)
        made = generate_batch(
            self.target, watched, prompts, params, max_new_tokens, seeds, self.ends, session=self.session
        )
        found = []
        for row, generation in enumerate(made):
            count = len(generation.tokens)
            places = [Place()] * count if watched is None else [Place(), *watched.places[row]][:count]
            found.append(Answer(generation.tokens, places))
        return found


def places_of(done: Round) -> list[Place]:
    """Of the tokens that a round emitted; the prefill has an empty one."""
    if done.tree is None or done.verdict is None:
        return [Place()]
    tree, found = done.tree, []
    for i in range(len(done.tokens)):
        parent = done.verdict.path[i - 1] if i else -1
        if tree.draft_prob is None:
            children = tuple(token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent)
            found.append(Place(i == 0, None, children))
        else:
            found.append(Place(i == 0, tree.draft_prob[i].clone() if i < len(tree.tokens) else None))
    return found


class Watched:
    """A drafter of the batched loop, and the places of every row's tokens after the first.

    Rows that are done idle along: a row's last places may be of nothing that was emitted.
    """

    def __init__(self, drafter: BatchDrafter):
        self._drafter, self.max_drafted, self.model = drafter, drafter.max_drafted, drafter.model
        self._chains: Chains | None = None
        self.places: list[list[Place]] = []
        self._rows: list[list[Place]] = []  # of the rows that are decoded on

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self.places = [[] for _ in prompts]
        self._rows = list(self.places)
        self._drafter.start(prompts, features, first_tokens)

    def propose(self, limits: Sequence[int], params: SamplingParams, uniforms: Tensor) -> Chains | None:
        self._chains = self._drafter.propose(limits, params, uniforms)
        return self._chains

    def advance(self, outcome: BatchOutcome) -> None:
        chains, self._chains = self._chains, None  # a round in which no row may draft proposes nothing
        for row, emitted in enumerate(outcome.emitted):
            drafted = chains.num_drafted[row] if chains is not None else 0
            for i in range(len(emitted)):
                distribution = None
                if chains is not None and chains.draft_prob is not None and i < drafted:
                    distribution = chains.draft_prob[row, i].clone()
                self._rows[row].append(Place(i == 0, distribution))
        self._drafter.advance(outcome)

    def select(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
        self._drafter.select(rows)


def seed_of(*of: Any) -> int:
    """63 bits of what makes an answer's random numbers its own: the run's seed, method, loop, prompt and number."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big") >> 1


def ends_as_asked(tokens: Sequence[int], ends: Sequence[int], most: int) -> bool:
    """An answer ends with its first end token, or is as long as it may be."""
    if not tokens or any(token in ends for token in tokens[:-1]):
        return False
    return len(tokens) == most or (len(tokens) < most and tokens[-1] in ends)
