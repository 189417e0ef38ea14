"""Answers of a method, and what had been drafted where each of their tokens was decided.

What stands in a `DraftedPlace` is known before its token is: a drafter's distribution depends on what came before, and
a policy keeps the token that it looked at. So given its place, too, a token of a lossless method follows the target.

Greedy answers are held against autoregression's, token by token, or, outside float32, against what is next to the best
there: a model read with another number of rows rounds differently, which in bfloat16 changes tokens. There a token may
be within a stated gap of the best logit of a float32 reference. Lengths are checked everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.modules.decoding.loop import Round, room_for
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Method, Models
from draftsmith.modules.targets.base import CausalLM, ModelInfo, Session
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()


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

            def on_round(done: Round, own: list[list[DraftedPlace]] = places) -> None:
                own[done.row] += places_of(done)

            runner = EngineRunner(self.target, self.drafter, params, self.ends, on_round, self.session, rows=self.rows)
            answers = runner(prompts[group], max_new_tokens, seeds[group])
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


def greedy_answers(
    runner: PlacedRunner, prompts: Sequence[BenchPrompt], max_new_tokens: int, seed: int
) -> list[list[int]]:
    """An answer to each prompt."""
    ids, seeds = [prompt.prompt_ids for prompt in prompts], [seed] * len(prompts)
    return [answer.tokens for answer in runner(ids, GREEDY, max_new_tokens, seeds)]


def greedy_test(
    answers: Sequence[list[int]],
    expected: Sequence[list[int]],
    prompts: Sequence[BenchPrompt],
    ends: Sequence[int],
    max_new_tokens: int,
    reference: CausalLM | None,
    info: ModelInfo,
    max_gap: float,
) -> dict[str, Any]:
    """Equality with `expected`, or, with a float32 `reference`, the largest gap to its best token; and that every
    answer ends with an end token or is as long as it may be. info: of the target."""
    first, gaps, ended = None, [0.0], True
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        most = room_for(prompt.prompt_ids, max_new_tokens, info)
        right_end = ends_as_asked(answer, ends, most)
        ended &= right_end
        wrong = not right_end or (reference is None and answer != wanted)
        if wrong and first is None:
            place = next((i for i, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b), None)
            first = {"prompt": prompt.id, "place": min(len(answer), len(wanted)) if place is None else place}
        if reference is not None and answer:
            gaps.append(largest_gap(reference, prompt.prompt_ids, answer))
    identical = sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True))
    close = all(gap <= max_gap for gap in gaps)  # false of NaN, too
    found: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": sum(map(len, answers)),
        "identical": identical,
        "ended_as_asked": ended,
        "first_difference": first,
        "passed": ended and (identical == len(prompts) if reference is None else close),
    }
    return found if reference is None else found | {"largest_logit_gap": max(gaps, key=lambda gap: (gap != gap, gap))}


@torch.inference_mode()
def largest_gap(reference: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """max over the answer's tokens of (best logit - its logit), teacher-forced."""
    ids = torch.tensor([[*prompt, *answer]], device=reference.device)
    logits = reference.lm_head(reference.features(ids)[0, len(prompt) - 1 : -1]).double()
    chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())
