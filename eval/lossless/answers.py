"""Answers of a method by one of the decoder's loops, and what had been drafted where each of their tokens was decided.

What stands in a `DraftedPlace` is known before its token is: a drafter's distribution depends on what came before, and
a policy keeps the token that it looked at. So given its place, too, a token of a lossless method follows the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from draftsmith.modules.decoding.loop import Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class DraftedPlace:
    """What had been drafted for a token: drawn from `distribution` [V], or chosen as `children`, or nothing.

    first: it was the first token of its round.
    """

    first: bool = False
    distribution: Tensor | None = None
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlacedAnswer:
    """tokens: with the end token, if it came. places: one a token; the first token's, the prefill's own, is empty."""

    tokens: list[int]
    places: list[DraftedPlace]


class DecodingLoop(Protocol):
    """A method, run by one of the loops. `name` is single or batched."""

    name: str

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        """An answer to each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class SingleLoop:
    """`modules.decoding.loop.generate`, one prompt after the other."""

    target: CausalLM
    drafter: Drafter | None
    ends: tuple[int, ...]
    session: Session | None = None
    name = "single"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        return [
            answer
            for prompt, seed in zip(prompts, seeds, strict=True)
            for answer in self.answers([prompt], params, max_new_tokens, [seed])
        ]

    def answers(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        """Answers to prompts that are decoded together."""
        places: list[list[DraftedPlace]] = [[] for _ in prompts]
        made = generate(
            self.target,
            self.drafter,
            prompts,
            params,
            max_new_tokens,
            [TorchSource(seed) for seed in seeds],
            self.ends,
            lambda done: places[done.row].extend(places_of(done)),
            session=self.session,
        )
        return [PlacedAnswer(answer.tokens, own) for answer, own in zip(made, places, strict=True)]


@dataclass(frozen=True)
class BatchedLoop(SingleLoop):
    """The same with all prompts together, as `eval bench --batch-size` and CUDA decode."""

    name = "batched"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        return self.answers(prompts, params, max_new_tokens, seeds)


def places_of(done: Round) -> list[DraftedPlace]:
    """The places of the tokens that a round emitted; the prefill has an empty one."""
    if done.tree is None or done.verdict is None:
        return [DraftedPlace()]
    tree, found = done.tree, []
    for i in range(len(done.tokens)):
        parent = done.verdict.path[i - 1] if i else -1
        if tree.draft_prob is None:
            children = tuple(token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent)
            found.append(DraftedPlace(i == 0, None, children))
        else:
            found.append(DraftedPlace(i == 0, tree.draft_prob[i].clone() if i < len(tree.tokens) else None))
    return found


def answer_seed(*of: Any) -> int:
    """63 bits of what makes an answer's random numbers its own: the run's seed, method, loop, prompt and number."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big") >> 1


def ends_as_asked(tokens: Sequence[int], ends: Sequence[int], most: int) -> bool:
    """An answer ends with its first end token, or is as long as it may be."""
    if not tokens or any(token in ends for token in tokens[:-1]):
        return False
    return len(tokens) == most or (len(tokens) < most and tokens[-1] in ends)
