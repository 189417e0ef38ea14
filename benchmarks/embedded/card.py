"""Model card of the embedded models: scores by task on held-out functions."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch

from draftsmith.benchmarks.embedded.domains import Domain
from draftsmith.benchmarks.embedded.language_model import Recipe
from draftsmith.data.console import markdown_lines
from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

MAX_NEW_TOKENS = 256
BATCH = 64


@dataclass(frozen=True)
class HeldOutPrompt:
    """A held-out prompt and the right answer, end token included."""

    task: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass
class TaskScore:
    """Sums over one task's held-out prompts; merged, a mean over tasks is a ratio of sums."""

    prompts: int = 0
    exact: int = 0
    ended: int = 0
    ngrams: int = 0
    distinct: int = 0
    sampled_tokens: int = 0
    overlap: float = 0.0
    greedy_tokens: int = 0
    agreed: int = 0
    chain_tokens: int = 0
    chain_calls: int = 0

    def merge(self, other: TaskScore) -> TaskScore:
        return TaskScore(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def rates(self) -> dict[str, float]:
        """Return the card's rates. alpha: mean of sum_v min(p, q) on the target's T=1 text; greedy_agreement: on its
        greedy text; tau: greedy chain, K=5; distinct_4grams of the greedy answers."""
        return {
            "prompts": self.prompts,
            "alpha": self.overlap / max(self.sampled_tokens, 1),
            "greedy_agreement": self.agreed / max(self.greedy_tokens, 1),
            "tau": self.chain_tokens / max(self.chain_calls, 1),
            "exact": self.exact / max(self.prompts, 1),
            "ended": self.ended / max(self.prompts, 1),
            "distinct_4grams": self.distinct / max(self.ngrams, 1),
        }


def answers_to(lm: CausalLM, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[list[int]]:
    """Generate the target's answers up to MAX_NEW_TOKENS."""
    params = SamplingParams(temperature)
    return generate_all(lm, prompts, params, MAX_NEW_TOKENS, BATCH, lambda row: RowUniforms("card", seed, row))


@torch.no_grad()
def _compare(target: CausalLM, draft: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, int]:
    """Sum over the tokens of `answer`, teacher-forced: sum_v min(p, q), and equal argmaxes."""
    ids = torch.tensor([[*prompt, *answer]])
    rows = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    p, q = (lm.lm_head(lm.features(ids)[0, rows]).float().softmax(-1) for lm in (target, draft))
    return torch.minimum(p, q).sum().item(), int((p.argmax(-1) == q.argmax(-1)).sum())


def score_pair(
    target: CausalLM, draft: CausalLM, questions: Sequence[HeldOutPrompt], seed: int, chain_prompts_per_task: int = 12
) -> dict[str, TaskScore]:
    """Score by task. Answers are the target's; nothing after their end token is counted."""
    prompts = [question.prompt_ids for question in questions]
    greedy, sampled = answers_to(target, prompts, 0.0, seed), answers_to(target, prompts, 1.0, seed)
    scores: dict[str, TaskScore] = defaultdict(TaskScore)
    ends = set(target.info.eos_ids)
    drafter = ChainDrafter(DraftModelNet(draft), FixedLengthStop(5), target.info.max_position)
    for question, text, sample in zip(questions, greedy, sampled, strict=True):
        score = scores[question.task]
        score.prompts += 1
        score.exact += tuple(text) == question.answer_ids
        score.ended += text[-1] in ends
        ngrams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        score.ngrams += len(ngrams)
        score.distinct += len(set(ngrams))
        score.sampled_tokens += len(sample)
        score.overlap += _compare(target, draft, question.prompt_ids, sample)[0]
        score.greedy_tokens += len(text)
        score.agreed += _compare(target, draft, question.prompt_ids, text)[1]
        if score.prompts <= chain_prompts_per_task:
            source = TorchSource(seed)
            made = generate_one(target, drafter, question.prompt_ids, SamplingParams(), MAX_NEW_TOKENS, source)
            totals = pool([made.trace])
            score.chain_tokens += totals.num_tokens
            score.chain_calls += totals.num_target_calls
    return dict(scores)


def total(scores: dict[str, TaskScore], tasks: Sequence[str]) -> TaskScore:
    """Sum the scores of `tasks`."""
    summed = TaskScore()
    for task in tasks:
        summed = summed.merge(scores.get(task, TaskScore()))
    return summed


def markdown_table(rows: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table with one line per task or model."""
    names = list(next(iter(rows.values())))
    cells = [
        [row, *(str(int(value)) if name == "prompts" else f"{value:.3f}" for name, value in rates.items())]
        for row, rates in rows.items()
    ]
    return "\n".join(markdown_lines(["", *names], cells))


def verbatim_samples(
    target: CausalLM, tokenizer: Any, questions: Sequence[HeldOutPrompt], seed: int, count: int = 5
) -> list[tuple[HeldOutPrompt, str, str]]:
    """Return up to `count` questions, chosen by seed, with prompt and greedy answer as text."""
    chosen = random.Random(seed).sample(list(questions), min(count, len(questions)))
    answers = answers_to(target, [question.prompt_ids for question in chosen], 0.0, seed)
    return [(q, tokenizer.decode(q.prompt_ids), tokenizer.decode(a)) for q, a in zip(chosen, answers, strict=True)]


@dataclass(frozen=True)
class BuildFacts:
    """Details of the card beside the scores."""

    sources: dict[str, str]
    num_rows: int
    num_tokens: int
    stages: dict[str, Recipe]
    held_out: dict[str, dict[str, float]]


LOOPING_BELOW = 0.7  # distinct 4-grams under which a task's greedy text counts as looping


def card_numbers(
    domain: Domain, held_out: dict[str, dict[str, float]], scores: dict[str, dict[str, TaskScore]]
) -> dict[str, Any]:
    """Return the content of card.json."""
    numbers: dict[str, Any] = {"held_out": held_out, "tasks": {}}
    for draft, by_task in scores.items():
        rows = {task: score.rates() for task, score in sorted(by_task.items())}
        looping = sorted(task for task, rates in rows.items() if rates["distinct_4grams"] < LOOPING_BELOW)
        for name, tasks in domain.sums.items():
            rows[name] = total(by_task, [task for task in tasks if task not in looping]).rates()
        numbers["tasks"][draft] = rows
        numbers["looping"] = looping
    return numbers


def render(
    domain: Domain, facts: BuildFacts, numbers: dict[str, Any], samples: Sequence[tuple[HeldOutPrompt, str, str]]
) -> str:
    """Return the card as Markdown."""
    tables = [f"### Target with `{draft}`\n\n{markdown_table(rows)}\n" for draft, rows in numbers["tasks"].items()]
    stages = (
        f"- `{name}`: {recipe.steps} steps of {recipe.tokens_per_step} tokens, learning rate {recipe.lr}"
        for name, recipe in facts.stages.items()
    )
    shown = (
        f"### {question.task}\n\n````\n{prompt}\n````\n\nanswer:\n\n````\n{answer}\n````\n"
        for question, prompt, answer in samples
    )
    return template(domain.card).substitute(
        sources=", ".join(f"{name} {version}" for name, version in facts.sources.items()),
        num_rows=f"{facts.num_rows:,}",
        million_tokens=f"{facts.num_tokens / 1e6:.1f}",
        stages="\n".join(stages),
        held_out=markdown_table(facts.held_out),
        max_new_tokens=MAX_NEW_TOKENS,
        looping_below=LOOPING_BELOW,
        apart=", ".join(numbers["looping"]) or "none",
        tables="\n".join(tables),
        samples="\n".join(shown),
    )


def notice(domain: Domain, facts: BuildFacts) -> str:
    """Return the licence notice of the training text and of the prompts, which contain excerpts."""
    rows = "\n".join(f"| {name} | {version} | {domain.sources[name]} |" for name, version in facts.sources.items())
    return template("NOTICE.md").substitute(rows=rows)


def template(name: str) -> Template:
    """Read a text of templates/."""
    return Template((Path(__file__).parent / "templates" / name).read_text("utf-8"))
