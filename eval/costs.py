"""The times of this machine that stop policies need for c=auto.

Each is measured when a method of the run first asks for it. A clock gives other numbers every time, and other numbers
make drafts of other lengths. So they are saved with a run's results, and a resumed run, or another one, loads them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from draftsmith.data.console import log_note
from draftsmith.eval.clock import Clock, clock_of, interleaved
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.method import CostModel, Models
from draftsmith.modules.drafters.methods import build_chains
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()

# Answers that c is measured on.
SHORT, LONG = 1, 6  # drafted tokens a round
C_PROMPT, C_TOKENS, C_REPEATS = 16, 10, 9
SLOW_S = 0.3  # seconds of a prompt
SMALLEST_C = 1e-3


class MeasuredTimes(CostModel):
    """Times of this machine for the methods of one run. step_costs: c by drafter."""

    def __init__(self) -> None:
        self.step_costs: dict[str, float] = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the times as `meta` of results.json holds them."""
        return {"step_costs": dict(self.step_costs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use these times; others are still measured on demand."""
        self.step_costs |= state.get("step_costs", {})

    def step_cost(self, models: Models, drafter: str) -> float:
        """Return c: the time of one more drafted token over that of a round without a draft.

        drafter: `draft` or the kind of the head that drafts chains.
        """
        key = f"{drafter}{models.variant}"
        if key not in self.step_costs:
            self.step_costs[key] = measure_step_cost(models, drafter, clock_of(models.target.device))
            about = f"a drafted token's time in rounds without a draft, measured here ({key})"
            log_note(f"draftsmith: c = {self.step_costs[key]:.3f}: {about}")
        return self.step_costs[key]


def measure_step_cost(models: Models, drafter: str, clock: Clock) -> float:
    """Return c, measured on greedy answers with two fixed draft lengths, interleaved.

    A round with n drafted tokens takes round_s + n * step_s: a target call, and for every drafted token the draft's
    step, its predictor, and one more row for the target to read. c = step_s / round_s; 1 for a head of one token.
    """
    target, prompt = models.target, [1] * C_PROMPT

    def answering(k: int) -> Callable[[int], Generation]:
        # These answers never end, so that all have the same number of tokens.
        chains = build_chains(replace(models, ends=()), drafter, FixedLengthStop(k))
        setup = DecodeOptions(session=target.session(1, models.capacity, chains.aux_layers))

        def answer(num_tokens: int) -> Generation:
            return generate_one(target, chains, prompt, GREEDY, num_tokens, TorchSource(0), (), setup)

        return answer

    # On a slow machine fewer rounds say as much.
    short, long = answering(SHORT), answering(LONG)
    started = clock()
    short(1)
    slow = clock() - started > SLOW_S
    num_tokens = C_TOKENS // 2 if slow else C_TOKENS
    traces = [answer(num_tokens).trace for answer in (short, long)]
    num_rounds = [max(len(trace.steps), 1) for trace in traces]
    few, many = (trace.num_draft_tokens / count for trace, count in zip(traces, num_rounds, strict=True))
    if many <= few:
        return 1.0

    calls = {"prompt": lambda: short(1), "short": lambda: short(num_tokens), "long": lambda: long(num_tokens)}
    taken = interleaved(calls, 1 if slow else C_REPEATS, clock, warm=True)
    # Each ratio is one of runs of the same moment: the load of other programs comes and goes.
    ratios = []
    for prompt_s, short_s, long_s in zip(taken["prompt"], taken["short"], taken["long"], strict=True):
        few_s, many_s = ((run_s - prompt_s) / count for run_s, count in zip((short_s, long_s), num_rounds, strict=True))
        # The straight line through two draft lengths. Noise may make a token cost less than nothing.
        step_s = (many_s - few_s) / (many - few)
        ratios.append(max(step_s / max(few_s - few * step_s, SMALLEST_C * few_s), SMALLEST_C))
    return statistics.median(ratios)
