"""Scores of the embedded models by task on held-out prompts, the content of card.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from draftsmith.benchmarks.embedded.language_model import TokenRow
from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.modules.along import Answer, along_model, read
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

MAX_NEW_TOKENS = 256
BATCH = 64
LOOPING_BELOW = 0.7  # distinct 4-grams under which a task's greedy text counts as looping
K = 5


def answers_to(lm: CausalLM, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[list[int]]:
    """Generate the target's answers up to MAX_NEW_TOKENS."""
    params = SamplingParams(temperature)
    return generate_all(lm, prompts, params, MAX_NEW_TOKENS, BATCH, lambda row: RowUniforms("card", seed, row))


@torch.inference_mode()
def overlap(target: CausalLM, draft: CausalLM, ids: Sequence[int], begin: int, params: SamplingParams) -> float:
    """Return the sum over an answer's tokens of the expected acceptance of a draft there, sum_v min(p, q)."""
    text = torch.tensor([ids])
    p, q = (probabilities(lm.lm_head(lm.features(text)[0, begin - 1 : -1]), params) for lm in (target, draft))
    return float(torch.minimum(p, q).sum())


def score_pair(
    target: CausalLM, draft: CausalLM, questions: Sequence[tuple[str, TokenRow]], seed: int
) -> list[dict[str, float | str]]:
    """Return a row of sums for each held-out question, a task and its row with the right answer.

    Answers are the target's; nothing after their end token is counted.
    """
    prompts = [row.ids[: row.answer_start] for _, row in questions]
    rows: list[dict[str, float | str]] = [{"task": task} for task, _ in questions]
    drafter, ends = along_model(K, draft, "draft"), set(target.info.eos_ids)
    for temperature, kind in ((0.0, "greedy"), (1.0, "sampled")):
        params, answers = SamplingParams(temperature), answers_to(target, prompts, temperature, seed)
        for row, (_, question), answer in zip(rows, questions, answers, strict=True):
            begin = question.answer_start
            ids = [*question.ids[:begin], *answer]
            row |= {f"{kind}_tokens": len(answer), f"{kind}_overlap": overlap(target, draft, ids, begin, params)}
            if params.greedy:
                ngrams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
                row |= {"ngrams": len(ngrams), "distinct": len(set(ngrams))}
                row |= {"exact": tuple(answer) == question.ids[begin:], "ended": answer[-1] in ends}
                text = read(target, ids, [Answer(begin, len(ids), begin + MAX_NEW_TOKENS)], params, ())
                row["calls"] = float(drafter.walk(text, [K])[0][0].calls[-1])
    return rows


def rates(rows: Iterable[Mapping[str, Any]], tasks: Sequence[str]) -> dict[str, float]:
    """Return the rates of some tasks, as ratios of sums.

    alpha: mean of sum_v min(p, q) on the target's T=1 text. On its greedy text, greedy_agreement: share of equal
    argmaxes, tau: of chains of K tokens, and distinct_4grams.
    """
    own = [row for row in rows if row["task"] in tasks]

    def share(above: str, below: str) -> float:
        return sum(row[above] for row in own) / max(sum(row[below] for row in own), 1)

    return {
        "prompts": len(own),
        "alpha": share("sampled_overlap", "sampled_tokens"),
        "greedy_agreement": share("greedy_overlap", "greedy_tokens"),
        "tau": share("greedy_tokens", "calls"),
        "exact": sum(row["exact"] for row in own) / max(len(own), 1),
        "ended": sum(row["ended"] for row in own) / max(len(own), 1),
        "distinct_4grams": share("distinct", "ngrams"),
    }


def card_numbers(sums: Mapping[str, Sequence[str]], scores: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rates by draft and task. sums: a name for several tasks, of which those that loop are left out."""
    numbers: dict[str, Any] = {"tasks": {}}
    for draft, rows in scores.items():
        by_task = {task: rates(rows, [task]) for task in sorted({row["task"] for row in rows})}
        looping = [task for task, own in by_task.items() if own["distinct_4grams"] < LOOPING_BELOW]
        summed = {name: rates(rows, [task for task in tasks if task not in looping]) for name, tasks in sums.items()}
        numbers["tasks"][draft], numbers["looping"] = by_task | summed, looping
    return numbers
