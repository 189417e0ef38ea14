"""What decoding costs on this machine, piece by piece: forwards of the target by rows, draft steps, and what a round
takes beyond them. From these and a trace the seconds of decoding follow, without decoding (SpecDec++, section 2: T =
t_draft N_draft + t_target N_target, here with t_target by the rows that are read)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.cost.clock import Clock, Stopwatch, medians
from draftsmith.eval.cost.fit import fit_positive
from draftsmith.eval.replay.coupling import ReadAnswer
from draftsmith.eval.replay.record import Recording, TargetAnswers, walk
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.protocols import Drafter, DraftTree
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.chains import Chain, StopRule, build_chains
from draftsmith.modules.drafters.methods import Autoregressive, Method, Models, Named
from draftsmith.modules.drafters.trees import DynamicTrees
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHILDREN = 4  # of every node of the trees whose cost is taken
STEPS = 6  # a draft's steps are the difference between one of so many and one of a single step
PROPOSALS = 24  # that are timed of a drafter on a prompt, of each length
CURVE_REPEATS = 15
PROBE_PROMPTS, PROBE_TOKENS, PROBE_REPEATS = 2, 40, 2
START = "start"


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter. prefill: reading the prompt. first: the draft's first step (tree: level), which reads what
    was emitted. step: every further one."""

    prefill: float
    first: float
    step: float


def straight(curve: Mapping[int, float], rows: int) -> float:
    """A straight line between the measured numbers of rows; beyond them the last one goes on, and never down: noise may
    have timed more rows as faster. A single number holds for all."""
    x, y = list(curve), list(curve.values())
    if len(x) > 1 and rows > x[-1]:
        return y[-1] + (rows - x[-1]) * max(0.0, y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(np.interp(rows, x, y))


@torch.inference_mode()
def target_curves(
    target: CausalLM,
    ids: Sequence[int],
    context: int,
    clock: Clock,
    rows_read: Sequence[int] = ROWS,
    repeats: int = CURVE_REPEATS,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one target call by rows, as chains and as trees, all logits included; of a short context the rows that
    it has positions for, behind half of it at least.

    ids: a prompt and its answer. context: of these tokens to keep, where there is room for so many.
    """
    limit = target.info.max_position
    kept = max(1, min(context, len(ids), limit - min(max(rows_read), limit // 2)))
    session = target.session(1, kept + max(rows_read) + 1)
    session.extend([ids[:kept]])

    def call(rows: int, tree: bool) -> None:
        fed = [ids[i % len(ids)] for i in range(rows)]
        session.extend([fed], [tree_parents(rows)] if tree else None, num_logits=rows)
        session.keep([kept])

    def levels(rows: int, tree: bool) -> int:
        return num_levels(tree_parents(rows)) if tree else rows

    kinds = [(rows, tree) for rows in rows_read for tree in (False, True) if levels(rows, tree) <= limit - kept]
    calls = {f"{rows} {tree}": lambda rows=rows, tree=tree: call(rows, tree) for rows, tree in kinds}
    taken = medians(calls, repeats, clock)
    chains, trees = ({rows: taken[f"{rows} {tree}"] for rows, tree in kinds if tree == kind} for kind in (False, True))
    return chains, trees


def tree_parents(rows: int) -> list[int]:
    """Parents in the trees whose cost is taken, the root first."""
    return [-1, *(i // CHILDREN for i in range(rows - 1))]


def num_levels(parents: Sequence[int]) -> int:
    """Positions that a tree takes, the root's among them."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return max(levels)


class ProbedDrafter:
    """A drafter whose proposals are of one step and of STEPS in turn, fewer where a context ends, and timed; all else
    is the drafter's own.

    prefill: seconds of each answer's first proposal. seconds: of the others, by the forwards that they took.
    """

    def __init__(self, drafter: Drafter, clock: Clock):
        self._drafter, self._watch, self._number = drafter, Stopwatch(clock), 0
        self.prefill: list[float] = []
        self.seconds: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def begin(self, *answer: Any) -> None:
        self._number = 0
        self._drafter.begin(*answer)

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        counts = [min(STEPS if self._number % 2 else 1, limit) for limit in limits]
        trees = self._watch.timed(self._drafter.propose)(counts, params, sources)
        taken, calls = self._watch.take(), trees[0].draft_calls
        if trees[0].tokens and calls:
            (self.seconds.setdefault(calls, []) if self._number else self.prefill).append(taken)
        self._number += 1
        return trees


def draft_cost(
    drafter: Drafter, prompts: Sequence[Sequence[int]], answers: Sequence[ReadAnswer], how: Recording, clock: Clock
) -> DraftCost:
    """The cost of draft steps, from proposals along the answers. The first one reads the prompt as well. Where a
    context leaves no room for a second step, one is taken to cost what the first does; where it leaves none for drafts,
    they cost nothing."""
    probed: Any = ProbedDrafter(drafter, clock)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for _ in walk(probed, answer, prompt, how, STEPS, number):
            pass
    if not probed.seconds:
        return DraftCost(statistics.median(probed.prefill) if probed.prefill else 0.0, 0.0, 0.0)
    few, many = min(probed.seconds), max(probed.seconds)
    first, last = (statistics.median(probed.seconds[count]) for count in (few, many))
    step = max(last - first, 0.0) / (many - few) if many > few else first / few
    return DraftCost(max(statistics.median(probed.prefill) - first, 0.0), max(first - (few - 1) * step, 0.0), step)


@dataclass(frozen=True)
class Overhead:
    """Seconds beyond the forwards: of a round (verification, the loop), and of a draft's step (its stop policy)."""

    round: float
    step: float


@dataclass(frozen=True)
class DecodingCosts:
    """Seconds, medians, on one machine.

    context: tokens that were kept before the rows that were read. start: an answer of one token, prefill and all.
    target, tree: rows -> one call of the target for a chain, for a tree. drafters: what drafts (`drafter_of`).
    families: name (`family_of`) -> what it takes beyond its forwards.
    """

    context: int
    start: float
    target: Mapping[int, float]
    tree: Mapping[int, float]
    drafters: Mapping[str, DraftCost] = field(default_factory=dict)
    families: Mapping[str, Overhead] = field(default_factory=dict)

    def target_s(self, rows: int, tree: bool = False) -> float:
        """Seconds of one call."""
        return straight(self.tree if tree else self.target, rows)

    def seconds(self, trace: DecodeTrace, named: Named) -> float:
        """Seconds of one answer with this trace, its prefill included."""
        extra = self.families.get(family_of(named), Overhead(0.0, 0.0))
        beyond = len(trace.steps) * extra.round + trace.draft_calls * extra.step
        return self.forward_seconds(trace, named.method) + beyond

    def forward_seconds(self, trace: DecodeTrace, method: Method) -> float:
        """The part that the models' forwards take."""
        drafter, is_tree = drafter_of(method), isinstance(method, DynamicTrees)
        cost = self.drafters[drafter] if drafter is not None else DraftCost(0.0, 0.0, 0.0)

        def of_round(step: DecodeStep) -> float:
            read = self.target_s(step.num_drafted + 1, is_tree and step.num_drafted > 1)
            return read + (cost.first + (step.draft_calls - 1) * cost.step if step.draft_calls else 0.0)

        return self.start + cost.prefill + sum(map(of_round, trace.steps))


def family_of(named: Named) -> str:
    """What methods of equal costs have in common: the name, and the width of trees or what drafts where it is not the
    name's own (`spec`, `eagle2/8`, `specdec++/eagle`)."""
    name, method = named.label.partition(":")[0], named.method
    if isinstance(method, DynamicTrees):
        return f"{name}/{method.topk}"
    by = method.drafter if isinstance(method, StopRule) else "draft"
    return name if by == "draft" else f"{name}/{by}"


def drafter_of(method: Method) -> str | None:
    """The key of `DecodingCosts.drafters`: `draft` or the kind of the head that drafts chains, `tree/TOPK`; None where
    no model drafts."""
    if isinstance(method, DynamicTrees):
        return f"tree/{method.topk}"
    return method.needs[0] if isinstance(method, Chain) else None


@torch.inference_mode()
def measure_costs(
    models: Models,
    prompts: Sequence[BenchPrompt],
    probes: Mapping[str, Sequence[Method]],
    params: SamplingParams,
    seed: int,
    clock: Clock,
) -> DecodingCosts:
    """probes: family -> settings of it that differ in the length of their drafts, two or more; `ar` among them. Some
    answers are decoded with each, for what a round takes beyond its forwards."""
    models = replace(models, ends=())  # what is timed goes on
    typical = typical_prompts(prompts)
    how = Recording(SamplingParams(), STEPS, 2 * PROPOSALS, seed, ())
    target_answers = TargetAnswers(models.target, how)

    def read(capture: tuple[int, ...] = ()) -> list[ReadAnswer]:
        return [target_answers.read(prompt, number, 0, capture) for number, prompt in enumerate(typical)]

    ids = [prompt.prompt_ids for prompt in typical]
    context = len(ids[0]) + PROBE_TOKENS // 2
    target, tree = target_curves(models.target, [*ids[0], *read()[0].answer.tokens], context, clock)
    used = {name: methods[0] for methods in probes.values() if (name := drafter_of(methods[0])) is not None}
    made = {name: fixed_drafter(models, used[name]) for name in sorted(used)}
    drafters = {name: draft_cost(own, ids, read(own.capture), how, clock) for name, own in made.items()}
    ran = run_probes(models, typical, probes, params, seed, clock)
    start = statistics.median(probe.seconds for probe in ran if probe.family == START)
    bare = DecodingCosts(context, start, target, tree, drafters)
    families = {family: overhead([probe for probe in ran if probe.family == family], bare) for family in probes}
    return replace(bare, families=families)


def typical_prompts(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Those whose lengths are nearest to the mean."""
    mean = statistics.fmean(len(prompt.prompt_ids) for prompt in prompts)
    return sorted(prompts, key=lambda prompt: abs(len(prompt.prompt_ids) - mean))[:PROBE_PROMPTS]


def fixed_drafter(models: Models, method: Method) -> Drafter:
    """What drafts with this method, without a rule that ends its drafts."""
    if isinstance(method, DynamicTrees):
        return method.fixed(models, method.topk, STEPS)
    return build_chains(models, method.needs[0], [FixedLength(STEPS)])


@dataclass(frozen=True)
class TimedAnswer:
    """One prompt answered by one setting: the median of its seconds."""

    family: str
    method: Method
    made: Generation
    seconds: float


def run_probes(
    models: Models,
    prompts: Sequence[BenchPrompt],
    probes: Mapping[str, Sequence[Method]],
    params: SamplingParams,
    seed: int,
    clock: Clock,
) -> list[TimedAnswer]:
    """Every setting on every prompt, interleaved; and answers of one token without a draft, as family START."""
    asked: list[tuple[str, Method, int]] = [(START, Autoregressive(), 1)]
    asked += [(family, method, PROBE_TOKENS) for family, methods in probes.items() for method in methods]
    calls: dict[str, Callable[[], list[Generation]]] = {}
    settings: dict[str, tuple[str, Method]] = {}
    for family, method, count in asked:
        runner = EngineRunner(models.target, method.build(models), params, ())
        for prompt in prompts:
            key = str(len(calls))
            settings[key], calls[key] = (family, method), partial(runner, [prompt.prompt_ids], count, [seed])
    made = {key: call()[0] for key, call in calls.items()}
    taken = medians(calls, PROBE_REPEATS, clock, warm=True)
    return [TimedAnswer(*settings[key], made[key], taken[key]) for key in calls]


def overhead(probes: Sequence[TimedAnswer], bare: DecodingCosts) -> Overhead:
    """What the answers of one family took beyond their forwards, by rounds and draft steps; neither is less than
    nothing."""
    counts = [(len(probe.made.trace.steps), probe.made.trace.draft_calls) for probe in probes]
    beyond = [probe.seconds - bare.forward_seconds(probe.made.trace, probe.method) for probe in probes]
    return Overhead(*fit_positive(counts, beyond).weights)
