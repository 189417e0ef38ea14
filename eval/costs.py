"""Times of this machine that `auto` settings need: c of the stop policies, and the seconds of a tree's round.

Each is measured when a method of the run first asks for it. A clock gives other numbers every time, and other numbers
make drafts of other lengths. So they are saved with a run's results, and a resumed run, or another one, loads them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftsmith.data.console import log_note
from draftsmith.eval.clock import Clock, clock_of, interleaved
from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.decoding.tree_rule import TreeTimes
from draftsmith.modules.drafters.method import CostModel, Models
from draftsmith.modules.drafters.methods import build_chains
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()

# Answers that c is measured on.
SHORT, LONG = 1, 6  # drafted tokens a round
C_PROMPT, C_TOKENS, C_REPEATS = 16, 10, 9
SLOW_S = 0.3  # seconds of a prompt
SMALLEST_C = 1e-3

# Calls and drafts that the times of trees are measured on.
TREE_ROWS, TREE_REPEATS, CHILDREN = (1, 2, 4, 8, 16, 32, 64), 5, 4
DRAFT_STEPS, DRAFT_ROUNDS = 6, 47
TREE_PROMPT, SEED = 128, 0
TARGET_CURVE = "target, by rows"  # key of the target's seconds among those of drafters


def interpolate(curve: Mapping[int, float], rows: float) -> float:
    """Return seconds for any number of rows, on straight lines between the measured numbers.

    Beyond them the last line goes on, but never down: noise may have timed more rows as faster. A single measured
    number holds for all.
    """
    x, y = list(curve), list(curve.values())
    if len(x) > 1 and rows > x[-1]:
        return y[-1] + (rows - x[-1]) * max(0.0, y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(np.interp(rows, x, y))


class MeasuredTimes(CostModel):
    """Times of this machine for the methods of one run.

    step_costs: c by drafter. tree_seconds: seconds of the parts of a tree's round, by what was timed. Both are JSON.
    """

    def __init__(self) -> None:
        self.step_costs: dict[str, float] = {}
        self.tree_seconds: dict[str, Any] = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the times as `meta` of results.json holds them."""
        return {"step_costs": dict(self.step_costs), "tree_times": dict(self.tree_seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use these times; others are still measured on demand."""
        self.step_costs |= state.get("step_costs", {})
        self.tree_seconds |= state.get("tree_times", {})

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

    def tree_times(self, models: Models, trees: str, probe: Callable[[int], Drafter]) -> TreeTimes:
        """Return seconds of the parts of a tree's round, measured on a prompt of random tokens.

        trees: name of these trees. probe: builds their drafter for a number of levels.
        """
        trees += models.variant
        if TARGET_CURVE not in self.tree_seconds or trees not in self.tree_seconds:
            target = models.target
            clock = clock_of(target.device)
            room = min(models.capacity, target.info.max_position) - DRAFT_ROUNDS - 1 - MAX_NODES
            draws = torch.Generator().manual_seed(SEED)
            size = (max(2, min(TREE_PROMPT, room)),)
            prompt = torch.randint(target.info.vocab_size, size, generator=draws).tolist()
            if TARGET_CURVE not in self.tree_seconds:
                self.tree_seconds[TARGET_CURVE] = time_target_trees(target, prompt, clock)
            if trees not in self.tree_seconds:
                self.tree_seconds[trees] = time_draft_steps(target, probe(DRAFT_STEPS), prompt, clock)
        # JSON's keys are text.
        curve = {int(rows): seconds for rows, seconds in self.tree_seconds[TARGET_CURVE].items()}
        # A target reads more rows in no less time: where the clock says otherwise, it errs.
        verify = itertools.accumulate((interpolate(curve, nodes + 1) for nodes in range(MAX_NODES + 1)), max)
        draft = self.tree_seconds[trees]
        return TreeTimes(draft["first"], draft["step"], tuple(verify))


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


@torch.inference_mode()
def time_target_trees(target: CausalLM, prompt: Sequence[int], clock: Clock) -> dict[int, float]:
    """Return the median seconds of a target call that scores a tree, by its rows, behind the prompt."""
    session = target.session(1, len(prompt) + max(TREE_ROWS) + 1)
    session.extend([prompt])
    # The root, then CHILDREN children of every node.
    parents = [-1, *(node // CHILDREN for node in range(max(TREE_ROWS) - 1))]

    def call(rows: int) -> None:
        session.extend([[prompt[i % len(prompt)] for i in range(rows)]], [parents[:rows]], logits_to_keep=rows)
        session.keep([len(prompt)])

    calls = {str(rows): functools.partial(call, rows) for rows in TREE_ROWS}
    taken = interleaved(calls, TREE_REPEATS, clock)
    return {int(rows): statistics.median(seconds) for rows, seconds in taken.items()}


@torch.inference_mode()
def time_draft_steps(target: CausalLM, drafter: Drafter, prompt: Sequence[int], clock: Clock) -> dict[str, float]:
    """Return seconds of a draft's `first` step (tree: level), which reads what was emitted, and of each further `step`.

    Drafts of one and of DRAFT_STEPS steps are made in turn along a greedy answer of the target.
    """
    session = target.session(1, len(prompt) + DRAFT_ROUNDS + 1, drafter.aux_layers)
    scores = session.extend([prompt], logits_to_keep=1)
    token = int(scores.logits[0, -1].argmax())
    drafter.start(prompt, scores.features[0], token)
    seconds: dict[int, list[float]] = {}  # by forwards of the drafter
    for number in range(DRAFT_ROUNDS):
        steps = DRAFT_STEPS if number % 2 else 1
        started = clock()
        tree = drafter.propose(steps, Sampler(GREEDY, TorchSource(SEED)))
        taken = clock() - started
        # The first draft reads the prompt as well.
        if number:
            seconds.setdefault(tree.draft_calls, []).append(taken)
        scores = session.extend([[token]], logits_to_keep=1)
        token = int(scores.logits[0, -1].argmax())
        drafter.advance(Outcome((token,), 0, scores.features[0], scores.logits[0]))
    # Two points of a straight line: the drafts with the fewest and with the most forwards.
    few, many = min(seconds), max(seconds)
    fewest_s, most_s = statistics.median(seconds[few]), statistics.median(seconds[many])
    step = max(most_s - fewest_s, 0.0) / (many - few) if many > few else fewest_s / few
    return {"first": max(fewest_s - (few - 1) * step, 0.0), "step": step}
