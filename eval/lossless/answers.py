"""Answers of a method, and what had been drafted where each of their tokens was decided.

What stands in a `DraftedPlace` is known before its token is: a drafter's distribution depends on what came before, and
a policy keeps the token that it looked at. So given its place, too, a token of a lossless method follows the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.modules.decoding.loop import Round, Setup, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Method, Models
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


@dataclass(frozen=True)
class PlacedRunner:
    """A method that answers so many prompts together. ends: tokens that end an answer."""

    target: CausalLM
    drafter: Drafter | None
    ends: tuple[int, ...]
    rows: int = 1
    session: Session | None = None

    @classmethod
    def of(cls, method: Method, models: Models, rows: int) -> PlacedRunner:
        """With a drafter of its own. Prompts that are alone get a session each, others share one."""
        drafter = method.build(models, rows)
        capture = () if drafter is None else drafter.capture
        session = models.target.session(rows, models.capacity, capture) if rows > 1 else None
        return cls(models.target, drafter, models.ends, rows, session)

    @property
    def loop(self) -> str:
        """How the decoder runs, as results name it."""
        return "single" if self.rows == 1 else "batched"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        """An answer to each prompt; the same seed gives the same tokens."""
        found: list[PlacedAnswer] = []
        for start in range(0, len(prompts), self.rows):
            group = slice(start, start + self.rows)
            places: list[list[DraftedPlace]] = [[] for _ in prompts[group]]
            setup = Setup(lambda done, own=places: own[done.row].extend(places_of(done)), self.session)
            sources = [TorchSource(seed) for seed in seeds[group]]
            answers = generate(
                self.target, self.drafter, prompts[group], params, max_new_tokens, sources, self.ends, setup
            )
            found += [PlacedAnswer(answer.tokens, own) for answer, own in zip(answers, places, strict=True)]
        return found


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
