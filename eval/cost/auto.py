"""What settings of `auto` go by on this machine: c of the policies that weigh a token against its time, and the times
of trees. Each is measured when it is first asked for in a run.

A clock gives other numbers every time, and drafts of other lengths with them. So they are kept with a run's results,
and an interrupted run, or another one, can go by them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import log_note
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import RESULTS
from draftsmith.eval.bench.runner import EngineRunner, Runner
from draftsmith.eval.cost.clock import Clock, clock_of, interleaved
from draftsmith.eval.cost.machine import PROPOSALS, STEPS, DraftCost, draft_cost, straight, target_curves
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.modules.acceptance.tree_rule import TreeTimes
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.drafters.chains import build_chains
from draftsmith.modules.drafters.methods import MachineTimes, Models
from draftsmith.modules.types import InputError, SamplingParams

SHORT, LONG = 1, 6  # drafted tokens of the rounds that are compared for c
C_PROMPT, C_TOKENS, C_REPEATS = 16, 10, 9
SLOW_S = 0.3  # where a prompt takes longer, rounds do, and fewer of them say as much
SMALLEST = 1e-3
TREE_ROWS, TREE_REPEATS = (1, 2, 4, 8, 16, 32, 64), 5
TREE_PROMPT, SEED = 128, 0
CURVE = "target, by rows"  # among the times of trees


class MeasuredTimes(MachineTimes):
    """Times of this machine, for the methods of one run.

    step_costs: c by what drafts. seconds: of the parts of trees' rounds, by what was timed. Both are JSON values.
    """

    def __init__(self) -> None:
        self.step_costs: dict[str, float] = {}
        self.seconds: dict[str, Any] = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The costs as `meta` of results.json has them."""
        return {"step_costs": dict(self.step_costs), "tree_times": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go by these; what is not among them is measured when it is asked for."""
        self.step_costs |= state.get("step_costs", {})
        self.seconds |= state.get("tree_times", {})

    def step_cost(self, models: Models, drafter: str, rows: int = 1) -> float:
        """c: what one more drafted token takes, by a round without a draft.

        drafter: what drafts chains. rows: that are decoded together.
        """
        key = drafter if rows == 1 else f"{drafter}, batches of {rows}"
        if key not in self.step_costs:
            self.step_costs[key] = measure_step_cost(models, drafter, rows, clock_of(models.target.device))
            about = f"a drafted token's time in rounds without a draft, measured here ({key})"
            log_note(f"draftsmith: c = {self.step_costs[key]:.3f}: {about}")
        return self.step_costs[key]

    @torch.inference_mode()
    def tree_times(self, models: Models, trees: str, probe: Callable[[int], Drafter]) -> TreeTimes:
        """Seconds of the parts of a round, on a prompt of random tokens: what they are changes no forward's time.

        trees: a name for these trees. probe: what drafts them with so many levels.
        """
        if CURVE not in self.seconds or trees not in self.seconds:
            clock = clock_of(models.target.device)
            how = Recording(SamplingParams(), STEPS, 2 * PROPOSALS, SEED, ())
            prompt = random_prompt(models, how.max_new_tokens + MAX_NODES)
            drafter = probe(STEPS)
            answer = TargetAnswers(models.target, how).read(prompt, 0, 0, drafter.capture)
            ids = prompt.prompt_ids
            if CURVE not in self.seconds:
                text = [*ids, *answer.answer.tokens]
                _, self.seconds[CURVE] = target_curves(models.target, text, len(ids), clock, TREE_ROWS, TREE_REPEATS)
            self.seconds[trees] = asdict(draft_cost(drafter, [ids], [answer], how, clock))
        curve = {int(rows): seconds for rows, seconds in self.seconds[CURVE].items()}  # JSON's keys are text
        return times_of(curve, DraftCost(**self.seconds[trees]), MAX_NODES)


def times_of_run(directory: Path) -> dict[str, dict[str, Any]]:
    """`MeasuredTimes.state_dict` of a finished run.

    Raises:
        InputError: there is none, or it holds something else.
    """
    path = Path(directory) / RESULTS
    remedy = "Name the --output of a finished `draftsmith eval bench` or `draftsmith eval tune`."
    if not path.is_file():
        raise InputError("costs", f"no {RESULTS} in {directory}", "the directory of a finished run", remedy)
    shape = {"meta": {"step_costs?": {"*": float}, "tree_times?": dict}}
    meta = read_object(path, shape, remedy)["meta"]
    found = {kind: meta.get(kind, {}) for kind in ("step_costs", "tree_times")}
    if not any(found.values()) or any(c <= 0 for c in found["step_costs"].values()):
        raise InputError("costs", f"{path} without measured costs", "a run that measured some", remedy)
    return found


def measure_step_cost(models: Models, drafter: str, rows: int, clock: Clock) -> float:
    """c from short answers with drafts of two lengths, interleaved, less the time of their prompts. 1 where the context
    has no room for drafts of two lengths.

    A round of n drafted tokens takes round_s + n step_s: a target call and what goes with it, and for every token the
    draft step, the predictor and the row that the target reads more. c = step_s / round_s.
    """
    room = models.target.info.max_position
    prompts, seeds = [[1] * max(1, min(C_PROMPT, room // 2))] * rows, [0] * rows
    short, long = (fixed_runner(models, drafter, rows, k) for k in (SHORT, LONG))
    started = clock()
    short(prompts, 1, seeds)
    slow = clock() - started > SLOW_S
    count = min(C_TOKENS // 2 if slow else C_TOKENS, room - len(prompts[0]))
    few, many = (drafted_and_rounds(runner(prompts, count, seeds)[0]) for runner in (short, long))
    calls = {
        "prompt": lambda: short(prompts, 1, seeds),
        "short": lambda: short(prompts, count, seeds),
        "long": lambda: long(prompts, count, seeds),
    }
    taken = interleaved(calls, 1 if slow else C_REPEATS, clock, warm=True)
    # A ratio of runs of the same moment each time: what else the machine does comes and goes.
    return statistics.median(
        ratio((few[0], (few_s - prompt_s) / few[1]), (many[0], (many_s - prompt_s) / many[1]))
        for prompt_s, few_s, many_s in zip(taken["prompt"], taken["short"], taken["long"], strict=True)
    )


def fixed_runner(models: Models, drafter: str, rows: int, k: int) -> Runner:
    """Greedy answers, never ended, with k drafted tokens a round."""
    models, greedy = replace(models, ends=()), SamplingParams()
    chains = build_chains(models, drafter, [FixedLength(k) for _ in range(rows)])
    session = models.target.session(rows, models.capacity, chains.capture)
    return EngineRunner(models.target, chains, greedy, (), session=session, rows=rows)


def drafted_and_rounds(made: Generation) -> tuple[float, int]:
    """Drafted tokens of a round, on average, and the rounds."""
    rounds = max(len(made.trace.steps), 1)
    return made.trace.num_draft_tokens / rounds, rounds


def ratio(short: tuple[float, float], long: tuple[float, float]) -> float:
    """c of the straight line through two (drafted tokens, seconds of a round)."""
    (few, few_s), (many, many_s) = short, long
    if many <= few:
        return 1.0
    step_s = (many_s - few_s) / (many - few)
    return max(step_s / max(few_s - few * step_s, SMALLEST * few_s), SMALLEST)


def random_prompt(models: Models, room: int) -> BenchPrompt:
    """room: for so many tokens after it."""
    info = models.target.info
    length = max(2, min(TREE_PROMPT, min(models.capacity, info.max_position) - room))
    draws = torch.Generator().manual_seed(SEED)
    return BenchPrompt("probe", torch.randint(info.vocab_size, (length,), generator=draws).tolist())


def times_of(curve: Mapping[int, float], draft: DraftCost, most_nodes: int) -> TreeTimes:
    """Times of trees of up to so many nodes. curve: seconds of the target's calls by rows."""
    calls = (straight(curve, nodes + 1) for nodes in range(most_nodes + 1))
    # A target reads more rows in no less time: where the clock says so, it errs.
    return TreeTimes(draft.first, draft.step, tuple(itertools.accumulate(calls, max)))
