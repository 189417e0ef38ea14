"""The greedy half: token by token what autoregression emits, or, outside float32, what is next to the best there.

A model read with another number of rows rounds differently, which in bfloat16 changes tokens: there a token may be
within a stated gap of the best logit of a float32 reference. Lengths are checked everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.lossless.answers import PlacedRunner, ends_as_asked
from draftsmith.modules.decoding.loop import room_for
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()


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
