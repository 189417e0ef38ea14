"""What decoding costs on this machine, piece by piece: forwards of the target by rows, draft steps, and what a round
takes beyond them. From these and a trace the seconds of decoding follow, without decoding (SpecDec++, section 2: T =
t_draft N_draft + t_target N_target, here with t_target by the rows that are read)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from draftsmith.eval.bench.measure import BenchPrompt, EngineRunner
from draftsmith.eval.cost.clocks import Clock, interleaved
from draftsmith.eval.methods.base import Method, Models, Named
from draftsmith.eval.methods.chains import StopRule, build_chains
from draftsmith.eval.methods.trees import Eagle2
from draftsmith.eval.replay.record import Answers, Reading, Recording, walk
from draftsmith.modules.decoding.growth import DynamicTree
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, Outcome
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.eagle.drafting import EagleTreeDrafter
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.sampling import Source
from draftsmith.modules.types import SamplingParams

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHILDREN = 4  # of every node of the trees whose cost is taken
STEPS = 6  # a draft's steps are the difference between one of so many and one of a single step
PROPOSALS, PROBE_PROMPTS, PROBE_TOKENS, PROBE_REPEATS, CURVE_REPEATS = 24, 2, 40, 2, 15
AR = "ar"
TARGET = "target"


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter. prefill: reading the prompt. first: the draft's first step (tree: level), which reads what
    was emitted. step: every further one."""

    prefill: float
    first: float
    step: float


@dataclass(frozen=True)
class Overhead:
    """Seconds beyond the forwards: of a round (verification, the loop), and of a draft's step (its stop policy)."""

    round: float
    step: float


@dataclass(frozen=True)
class Costs:
    """Seconds, medians, on one machine.

    context: tokens that were kept before the rows that were read. start: an answer of one token, prefill and all.
    target, tree: rows [ROWS] -> one call of the target for a chain, for a tree. drafters: `draft`, `eagle`, or
    `tree/TOPK`. families: name (`family_of`) -> what it takes beyond its forwards.
    """

    context: int
    start: float
    target: Mapping[int, float]
    tree: Mapping[int, float]
    drafters: Mapping[str, DraftCost] = field(default_factory=dict)
    families: Mapping[str, Overhead] = field(default_factory=dict)

    def target_s(self, rows: int, tree: bool = False) -> float:
        """Of one call."""
        return straight(self.tree if tree else self.target, rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Costs:
        curves = {name: {int(rows): s for rows, s in raw[name].items()} for name in ("target", "tree")}
        drafters = {name: DraftCost(**cost) for name, cost in raw["drafters"].items()}
        families = {name: Overhead(**cost) for name, cost in raw["families"].items()}
        return cls(raw["context"], raw["start"], **curves, drafters=drafters, families=families)


def straight(curve: Mapping[int, float], rows: int) -> float:
    """Between the measured numbers of rows a straight line; beyond them the last one goes on, and never down: noise may
    have timed more rows as faster. A single number holds for all."""
    x, y = list(curve), list(curve.values())
    if len(x) > 1 and rows > x[-1]:
        return y[-1] + (rows - x[-1]) * max(0.0, y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(np.interp(rows, x, y))


def family_of(named: Named) -> str:
    """What methods of equal costs have in common: `spec`, `specdec++/eagle`, `eagle2/8`."""
    name = named.label.partition(":")[0]
    if isinstance(named.method, Eagle2):
        return f"{name}/{named.method.topk}"
    return f"{name}/eagle" if isinstance(named.method, StopRule) and named.method.drafter == "eagle" else name


def drafter_of(family: str) -> str | None:
    """The key of `Costs.drafters`; None where no model drafts."""
    name, _, more = family.partition("/")
    if name == "eagle2":
        return f"tree/{more}"
    if name in (AR, "pld"):
        return None
    return "eagle" if "eagle" in (name, more) else "draft"


def seconds(trace: DecodeTrace, costs: Costs, family: str) -> float:
    """Of one answer with this trace, its prefill included."""
    extra = costs.families.get(family, Overhead(0.0, 0.0))
    beyond = len(trace.steps) * extra.round + trace.draft_calls * extra.step
    return forward_seconds(trace, costs, family) + beyond


def forward_seconds(trace: DecodeTrace, costs: Costs, family: str) -> float:
    """The part that the models' forwards take."""
    drafter = drafter_of(family)
    cost = costs.drafters[drafter] if drafter is not None else DraftCost(0.0, 0.0, 0.0)
    is_tree = family.startswith("eagle2/")

    def of_round(step: DecodeStep) -> float:
        read = costs.target_s(step.num_drafted + 1, is_tree and step.num_drafted > 1)
        return read + (cost.first + (step.draft_calls - 1) * cost.step if step.draft_calls else 0.0)

    return costs.start + cost.prefill + sum(map(of_round, trace.steps))


@torch.inference_mode()
def measure_costs(
    models: Models,
    prompts: Sequence[BenchPrompt],
    probes: Mapping[str, Sequence[Method]],
    params: SamplingParams,
    seed: int,
    clock: Clock,
) -> Costs:
    """probes: family -> settings of it that differ in the length of their drafts, two or more; `ar` among them. Some
    answers are decoded with each, for what a round takes beyond its forwards."""
    models = replace(models, ends=())  # what is timed goes on
    typical = typical_prompts(prompts)
    how = Recording(SamplingParams(), STEPS, 2 * PROPOSALS, seed, ())
    answers = Answers(models.target, how)
    readings = [answers.read(prompt, number, 0) for number, prompt in enumerate(typical)]
    context = len(typical[0].prompt_ids) + PROBE_TOKENS // 2
    target, tree = target_curves(models, typical[0], readings[0], context, clock)
    used = sorted(name for name in map(drafter_of, probes) if name is not None)
    drafters = {
        name: draft_cost(fixed_drafter(name, models), typical, readings, how, clock) for name in dict.fromkeys(used)
    }
    ran = run_probes(models, typical, probes, params, seed, clock)
    start = statistics.median(run.seconds for run in ran if run.family == TARGET)
    bare = Costs(context, start, target, tree, drafters)
    families = {family: overhead([run for run in ran if run.family == family], bare) for family in probes}
    return Costs(context, start, target, tree, drafters, families)


def typical_prompts(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Those whose lengths are nearest to the mean."""
    mean = statistics.fmean(len(prompt.prompt_ids) for prompt in prompts)
    return sorted(prompts, key=lambda prompt: abs(len(prompt.prompt_ids) - mean))[:PROBE_PROMPTS]


def target_curves(
    models: Models,
    prompt: BenchPrompt,
    reading: Reading,
    context: int,
    clock: Clock,
    rows_read: Sequence[int] = ROWS,
    repeats: int = CURVE_REPEATS,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one target call by rows, as chains and as trees, all logits included; of a short context the rows that
    it has positions for, behind half of it at least. context: tokens to keep, where there is room for so many."""
    ids = [*prompt.prompt_ids, *reading.answer.tokens]
    limit = models.target.info.max_position
    kept = max(1, min(context, len(ids), limit - min(max(rows_read), limit // 2)))
    session = models.target.session(1, kept + max(rows_read) + 1)
    session.extend([ids[:kept]])

    def call(rows: int, tree: bool) -> None:
        fed = [ids[i % len(ids)] for i in range(rows)]
        session.extend([fed], [tree_parents(rows)] if tree else None, num_logits=rows)
        session.keep([kept])

    calls = {
        (rows, tree): lambda rows=rows, tree=tree: call(rows, tree)
        for rows in rows_read
        for tree in (False, True)
        if (num_levels(tree_parents(rows)) if tree else rows) <= limit - kept
    }
    named = {f"{rows} {tree}": run for (rows, tree), run in calls.items()}
    taken = interleaved(named, repeats, clock)
    found = {key: statistics.median(taken[f"{key[0]} {key[1]}"]) for key in calls}
    chains, trees = ({rows: s for (rows, tree), s in found.items() if tree == kind} for kind in (False, True))
    return chains, trees


def tree_parents(rows: int) -> list[int]:
    """Of the trees whose cost is taken, the root first."""
    return [-1, *(i // CHILDREN for i in range(rows - 1))]


def num_levels(parents: Sequence[int]) -> int:
    """Positions that a tree takes, the root's among them."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return max(levels)


def fixed_drafter(name: str, models: Models) -> Drafter:
    """The drafter of `Costs.drafters`, without a stop policy of its own."""
    if name.startswith("tree/"):
        assert isinstance(models.eagle, EagleHead)
        topk = int(name.removeprefix("tree/"))
        return EagleTreeDrafter(models.eagle, models.target, DynamicTree(topk, STEPS, topk), models.capacity)
    return build_chains(models, name, [FixedLength(STEPS)])


class _Timed:
    """A drafter whose proposals are of one step and of STEPS in turn, fewer where a context ends, and timed.

    prefill: of each answer's first proposal. seconds: of the others, by the forwards that they took.
    """

    def __init__(self, drafter: Drafter, clock: Clock):
        self._drafter, self._clock, self._number = drafter, clock, 0
        self.capture = drafter.capture
        self.prefill: list[float] = []
        self.seconds: dict[int, list[float]] = {}

    def start(
        self, prompts: Sequence[Sequence[int]], features: Sequence[torch.Tensor], first_tokens: Sequence[int]
    ) -> None:
        self._number = 0
        self._drafter.start(prompts, features, first_tokens)

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        count = STEPS if self._number % 2 else 1
        started = self._clock()
        trees = self._drafter.propose([min(count, limit) for limit in limits], params, sources)
        taken = self._clock() - started
        calls = trees[0].draft_calls
        if calls:
            (self.seconds.setdefault(calls, []) if self._number else self.prefill).append(taken)
        self._number += 1
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        self._drafter.advance(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        self._drafter.select(rows)


def draft_cost(
    drafter: Drafter, prompts: Sequence[BenchPrompt], readings: Sequence[Reading], how: Recording, clock: Clock
) -> DraftCost:
    """From proposals along the answers. The first one reads the prompt as well. Where a context leaves no room for a
    second step, one is taken to cost what the first does; where it leaves none for drafts, they cost nothing."""
    timed = _Timed(drafter, clock)
    for number, (prompt, reading) in enumerate(zip(prompts, readings, strict=True)):
        for _ in walk(timed, reading, prompt.prompt_ids, how, STEPS, number):
            pass
    if not timed.seconds:
        return DraftCost(statistics.median(timed.prefill) if timed.prefill else 0.0, 0.0, 0.0)
    few, many = min(timed.seconds), max(timed.seconds)
    first, last = (statistics.median(timed.seconds[count]) for count in (few, many))
    step = max(last - first, 0.0) / (many - few) if many > few else first / few
    return DraftCost(max(statistics.median(timed.prefill) - first, 0.0), max(first - (few - 1) * step, 0.0), step)


@dataclass(frozen=True)
class _Probe:
    """One prompt answered by one setting: the median of its seconds."""

    family: str
    made: Generation
    seconds: float


def run_probes(
    models: Models,
    prompts: Sequence[BenchPrompt],
    probes: Mapping[str, Sequence[Method]],
    params: SamplingParams,
    seed: int,
    clock: Clock,
) -> list[_Probe]:
    """Every setting on every prompt, interleaved; and answers of one token, as family `target`."""
    settings = [(family, method) for family, methods in probes.items() for method in methods]
    made: dict[str, Generation] = {}
    calls: dict[str, Any] = {}
    family_of_call: dict[str, str] = {}

    def add(key: str, family: str, runner: EngineRunner, prompt: BenchPrompt, count: int) -> None:
        family_of_call[key] = family

        def call() -> None:
            made[key] = runner(prompt.prompt_ids, count, seed)

        calls[key] = call

    for place, prompt in enumerate(prompts):
        add(f"start {place}", TARGET, EngineRunner(models.target, None, params, ()), prompt, 1)
    for number, (family, method) in enumerate(settings):
        runner = EngineRunner(models.target, method.build(models), params, ())
        for place, prompt in enumerate(prompts):
            add(f"{number} {place}", family, runner, prompt, PROBE_TOKENS)
    taken = interleaved(calls, PROBE_REPEATS, clock)
    return [_Probe(family_of_call[key], made[key], statistics.median(taken[key])) for key in calls]


def overhead(runs: Sequence[_Probe], bare: Costs) -> Overhead:
    """What the runs of one family took beyond their forwards, by least squares over rounds and draft steps; neither is
    less than nothing."""
    family = runs[0].family
    beyond = np.array([run.seconds - forward_seconds(run.made.trace, bare, family) for run in runs])
    counts = np.array([[len(run.made.trace.steps), run.made.trace.draft_calls] for run in runs], float)
    for columns in ([0, 1], [0], [1]):
        part = counts[:, columns]
        if not part.any(0).all():
            continue
        found = np.linalg.lstsq(part, beyond, rcond=None)[0]
        if (found >= 0).all():
            per = dict(zip(columns, found.tolist(), strict=True))
            return Overhead(per.get(0, 0.0), per.get(1, 0.0))
    return Overhead(0.0, 0.0)
