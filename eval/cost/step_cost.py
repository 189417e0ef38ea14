"""What one more drafted token costs on this machine, in rounds: the c of policies that weigh a token against its time.

A round of n drafted tokens takes round_s + n step_s: a target call and what goes with it, and for every token the draft
step, its judgement and the row that the target reads more. c = step_s / round_s.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftsmith.eval.bench.measure import BatchRunner, GroupRunner
from draftsmith.eval.cost.clocks import Clock, interleaved, synchronised
from draftsmith.eval.methods.base import Models
from draftsmith.eval.methods.chains import build_chains
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.types import SamplingParams

SHORT, LONG = 1, 6  # drafted tokens of the rounds that are compared
PROMPT, NEW_TOKENS, REPEATS = 16, 10, 9
SLOW_S = 0.3  # where a prompt takes longer, rounds do, and fewer of them say as much
SMALLEST = 1e-3


def step_cost(models: Models, drafter: str, rows: int = 1) -> float:
    """c of this drafter (`draft` or `eagle`): measured when it is first asked for in a run, and said.

    rows: that are decoded together.
    """
    key = drafter if rows == 1 else f"{drafter}, batches of {rows}"
    if key not in models.step_costs:
        models.step_costs[key] = measure_step_cost(models, drafter, rows, own_clock(models))
        about = f"a drafted token's time in rounds without a draft, measured here ({key})"
        print(f"draftsmith: c = {models.step_costs[key]:.3f}: {about}", file=sys.stderr)
    return models.step_costs[key]


def own_clock(models: Models) -> Clock:
    """CPU time where one thread does everything, else the wall's."""
    alone = models.target.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else synchronised


def measure_step_cost(models: Models, drafter: str, rows: int, clock: Clock) -> float:
    """From short answers with drafts of two lengths, interleaved, less the time of their prompts. 1 where the context
    has no room for drafts of two lengths."""
    made: dict[str, Generation] = {}
    room = models.target.info.max_position
    prompt = [1] * max(1, min(PROMPT, room // 2))

    def answer(name: str, runner: GroupRunner, count: int) -> Callable[[], Any]:
        def call() -> None:
            made[name] = runner([prompt] * rows, count, [0] * rows)[0]

        return call

    short, long = (fixed_runner(models, drafter, rows, k) for k in (SHORT, LONG))
    started = clock()
    answer("prompt", short, 1)()
    slow = clock() - started > SLOW_S
    count = min(NEW_TOKENS // 2 if slow else NEW_TOKENS, room - len(prompt))
    calls = {
        "prompt": answer("prompt", short, 1),
        "short": answer("short", short, count),
        "long": answer("long", long, count),
    }
    taken = interleaved(calls, 1 if slow else REPEATS, clock)
    # A ratio of runs of the same moment each time: what else the machine does comes and goes.
    found = [
        ratio(point(made["short"], few - prompt_s), point(made["long"], many - prompt_s))
        for prompt_s, few, many in zip(taken["prompt"], taken["short"], taken["long"], strict=True)
    ]
    return statistics.median(found)


def fixed_runner(models: Models, drafter: str, rows: int, k: int) -> GroupRunner:
    """Greedy answers, never ended, with k drafted tokens a round."""
    models = replace(models, ends=())
    chains = build_chains(models, drafter, [FixedLength(k) for _ in range(rows)])
    session = models.target.session(rows, models.capacity, chains.capture)
    return BatchRunner(models.target, session, chains, SamplingParams(), ())


def point(made: Generation, seconds: float) -> tuple[float, float]:
    """Drafted tokens of a round, on average, and its seconds."""
    rounds = max(len(made.trace.steps), 1)
    return made.trace.num_draft_tokens / rounds, seconds / rounds


def ratio(short: tuple[float, float], long: tuple[float, float]) -> float:
    """c of the straight line through two (drafted tokens, seconds of a round)."""
    (few, few_s), (many, many_s) = short, long
    if many <= few:
        return 1.0
    step_s = (many_s - few_s) / (many - few)
    return max(step_s / max(few_s - few * step_s, SMALLEST * few_s), SMALLEST)
