"""Answers of a method together with what had been drafted where each token was decided, and the greedy test."""

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
    """Draft at the place of one emitted token, known before the token was decided.

    Given its place, a token of a lossless method still follows the target: a drafter's distribution depends only on
    what came before, and a stop policy keeps the token that it looked at.

    Attributes:
        first: the token is the first of its round.
        distribution: [V], the distribution that a draft was sampled from, if one was.
        children: tokens drafted as children of a tree node, without sampling.
    """

    first: bool = False
    distribution: Tensor | None = None
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlacedAnswer:
    """An answer, including its end token, with one place per token. The prefill's token has an empty place."""

    tokens: list[int]
    places: list[DraftedPlace]


@dataclass(frozen=True)
class PlacedRunner:
    """Decoding of `rows` prompts at a time by one method, recording the places of the tokens."""

    target: CausalLM
    drafter: Drafter | None
    ends: tuple[int, ...]
    rows: int = 1
    session: Session | None = None

    @classmethod
    def of(cls, method: Method, models: Models, rows: int) -> PlacedRunner:
        """Build a runner with a drafter of its own, which has learned nothing yet."""
        drafter = method.build(models, rows)
        capture = () if drafter is None else drafter.capture
        session = models.target.session(rows, models.capacity, capture) if rows > 1 else None
        return cls(models.target, drafter, models.ends, rows, session)

    @property
    def loop(self) -> str:
        return "single" if self.rows == 1 else "batched"

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seeds: Sequence[int]
    ) -> list[PlacedAnswer]:
        """Answer each prompt; the same seed gives the same tokens."""
        answers: list[PlacedAnswer] = []
        for start in range(0, len(prompts), self.rows):
            group = slice(start, start + self.rows)
            places: list[list[DraftedPlace]] = [[] for _ in prompts[group]]

            def record(done: Round, places: list[list[DraftedPlace]] = places) -> None:
                places[done.row] += places_of(done)

            runner = EngineRunner(self.target, self.drafter, params, self.ends, record, self.session, rows=self.rows)
            decoded = runner(prompts[group], max_new_tokens, seeds[group])
            answers += [PlacedAnswer(each.tokens, row) for each, row in zip(decoded, places, strict=True)]
        return answers


def places_of(done: Round) -> list[DraftedPlace]:
    """Return the places of the tokens that a round emitted."""
    if done.tree is None or done.verdict is None:  # the prefill
        return [DraftedPlace()]
    tree, places = done.tree, []
    for i in range(len(done.tokens)):
        if tree.draft_prob is not None:
            places.append(DraftedPlace(i == 0, tree.draft_prob[i].clone() if i < len(tree.tokens) else None))
        else:
            parent = done.verdict.path[i - 1] if i else -1
            children = (token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent)
            places.append(DraftedPlace(i == 0, None, tuple(children)))
    return places


def answer_seed(*parts: Any) -> int:
    """Return a 63-bit seed that differs with the run's seed, method, loop, prompt and answer number."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def ends_as_asked(tokens: Sequence[int], ends: Sequence[int], max_tokens: int) -> bool:
    """Check that an answer ends with its first end token or at its length limit."""
    if not tokens or any(token in ends for token in tokens[:-1]):
        return False
    return len(tokens) == max_tokens or (len(tokens) < max_tokens and tokens[-1] in ends)


def greedy_answers(
    runner: PlacedRunner, prompts: Sequence[BenchPrompt], max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Decode every prompt greedily."""
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
    """Compare greedy answers with autoregressive ones.

    In float32 the tokens must be equal. In other dtypes another number of rows rounds differently and may change a
    token, so there each token must be within `max_gap` of the best logit of a float32 `reference`. In every dtype an
    answer must end with an end token or at its limit, so a truncated answer fails.
    """
    first_difference, gaps, all_end = None, [0.0], True
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        ends_well = ends_as_asked(answer, ends, room_for(prompt.prompt_ids, max_new_tokens, info))
        all_end &= ends_well
        if first_difference is None and (not ends_well or (reference is None and answer != wanted)):
            differs = (i for i, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b)
            first_difference = {"prompt": prompt.id, "place": next(differs, min(len(answer), len(wanted)))}
        if reference is not None and answer:
            gaps.append(largest_gap(reference, prompt.prompt_ids, answer))

    identical = sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True))
    close = all(gap <= max_gap for gap in gaps)  # false for NaN
    row: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": sum(map(len, answers)),
        "identical": identical,
        "ended_as_asked": all_end,
        "first_difference": first_difference,
        "passed": all_end and (identical == len(prompts) if reference is None else close),
    }
    # NaN sorts first, so that it is what the result shows.
    return row if reference is None else row | {"largest_logit_gap": max(gaps, key=lambda gap: (gap != gap, gap))}


@torch.inference_mode()
def largest_gap(reference: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the largest difference between the best logit and an answer token's, teacher-forced."""
    ids = torch.tensor([[*prompt, *answer]], device=reference.device)
    logits = reference.lm_head(reference.features(ids)[0, len(prompt) - 1 : -1]).double()  # [T, V]
    chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]  # [T]
    return float((logits.max(-1).values - chosen).max())
