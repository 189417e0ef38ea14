"""Our own chain on prompts that an engine answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.trace import tau
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# Counts of chains of K tokens: rounds with a draft, then for each place the drafts accepted at least up to it.
Counts = tuple[int, ...]  # [1 + K]


def counts_of(accepted: Sequence[int], length: int) -> Counts:
    """Count rounds by place from the accepted tokens of each."""
    return len(accepted), *(sum(count > place for count in accepted) for place in range(length))


@dataclass(frozen=True)
class EngineAnswer:
    """A greedy answer and the counts of its rounds.

    first_s, generation_s: from the request to its first token, and from there to its last; 0 if unknown. drafted:
    tokens of all drafts; None if unknown. by_place: false if only sums are known: `counts` is then (0, accepted
    tokens). unsent: tokens whose ids are not among `tokens`.
    """

    tokens: tuple[int, ...]
    counts: Counts
    generation_s: float = 0.0
    drafted: int | None = None
    by_place: bool = True
    first_s: float = 0.0
    unsent: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.unsent

    @property
    def accepted(self) -> int:
        return sum(self.counts[1:])


@dataclass(frozen=True)
class Counted:
    """Tokens of some answers, and the counts of their drafts: empty without a drafter."""

    num_answers: int
    num_tokens: int
    counts: Counts

    @classmethod
    def of(cls, answers: Sequence[EngineAnswer], counts: Counts | None = None) -> Counted:
        """Count answers. counts: of all of them, where a server does not count each by itself."""
        if counts is None:
            counts = tuple(map(sum, itertools.zip_longest(*(answer.counts for answer in answers), fillvalue=0)))
        lengths = [answer.num_tokens for answer in answers if answer.num_tokens]
        return cls(len(lengths), sum(lengths), counts)

    @property
    def num_target_calls(self) -> int:
        """Calls of the target, of which one reads each prompt and emits its answer's first token."""
        # Rounds without a draft are not counted, but emit a token of the target. A round whose last drafted token ends
        # the answer is counted, and emits none.
        own = self.num_tokens - self.num_answers - sum(self.counts[1:])
        return self.num_answers + max(sum(self.counts[:1]), own)


def tau_of(counted: Sequence[Counted]) -> float:
    """Return tau over answers."""
    return tau(sum(one.num_tokens for one in counted), sum(one.num_target_calls for one in counted))


def accepted_by_place(counted: Sequence[Counted]) -> list[float]:
    """Return the share of rounds with a draft in which n tokens or more were accepted, for n = 1, 2, ..."""
    sums = [sum(column) for column in itertools.zip_longest(*(one.counts for one in counted), fillvalue=0)]
    return [count / sums[0] for count in sums[1:]] if sums and sums[0] else []


class MovedStates:
    """A drafter that reads states of other tokens at some rows of the prompt. rows: place, and the token read there."""

    def __init__(self, drafter: Any, rows: Sequence[tuple[int, int]]):
        self._drafter, self._rows = drafter, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        moved = features.clone()
        for place, token in self._rows:
            moved[place] = features[token]
        self._drafter.start(prompt, moved, first_token)


@dataclass(frozen=True)
class OurChain:
    """Greedy chains of `length` tokens for a target.

    whole: the last draft of an answer is as long as the others and counts whole, also beyond an end token or the length
    limit, as in vLLM. Otherwise it ends before the limit, as here and in llama.cpp.
    moved: prompt length -> rows whose state an EAGLE-3 head reads of another token, and that token, as in llama.cpp.
    """

    target: CausalLM
    length: int
    max_new_tokens: int
    whole: bool = True
    moved: Callable[[int], Sequence[tuple[int, int]]] = lambda length: ()

    def room(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest sequence: the last draft is as long as the others."""
        return len(prompt) + self.max_new_tokens + self.length + 1

    def answer(self, prompt: Sequence[int], kind: str, drafter: Any) -> EngineAnswer:
        """Decode a prompt; kind: of the head `drafter`, or `draft` for a model."""
        loaded: dict[str, Any] = {"draft": drafter} if kind == MODEL else {"heads": {kind: drafter}}
        # A block misread may be a token shorter.
        length = min(self.length, getattr(drafter.config, "drafts", self.length))
        name = "spec" if kind == MODEL else kind
        method = parse_method(f"{name}:k={length}")
        # `Models.ends` stays empty: engines draft beyond an end token.
        chain = method.build(Models(self.target, capacity=self.room(prompt) + self.length + 1, **loaded))
        if kind == "eagle3" and (rows := self.moved(len(prompt))):
            chain = MovedStates(chain, rows)
        # Further than asked, so that the last draft is whole.
        limit = self.max_new_tokens + (self.length + 1 if self.whole else 0)
        answer = generate_one(self.target, chain, prompt, SamplingParams(), limit, TorchSource(0))
        accepted, drafted, emitted = [], 0, answer.trace.prefill_emitted
        for step in answer.trace.steps:
            # A round without a draft, before the limit, is none that an engine counts.
            if emitted < self.max_new_tokens and step.num_drafted:
                count = step.num_accepted
                if not self.whole and step.num_emitted < step.num_drafted:
                    count = min(count, step.num_emitted - 1)  # llama.cpp counts no end token inside of a draft
                accepted.append(count)
                drafted += step.num_drafted
            emitted += step.num_emitted
        counts = counts_of(accepted, self.length)
        return EngineAnswer(tuple(answer.tokens[: self.max_new_tokens]), counts, drafted=drafted)
