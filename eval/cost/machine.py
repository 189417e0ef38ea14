"""What decoding costs on this machine, piece by piece: forwards of the target by rows, draft steps, and what a round
takes beyond them. From these and a trace the seconds of decoding follow, without decoding (SpecDec++, section 2: T =
t_draft N_draft + t_target N_target, here with t_target by the rows that are read)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.cost.clock import Clock, medians
from draftsmith.eval.cost.fit import fit_positive
from draftsmith.eval.cost.forwards import PROPOSALS, STEPS, DraftCost, draft_cost, straight, target_curves
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.chains import StopRule, build_chain, chain_methods
from draftsmith.modules.drafters.eagle.methods import Eagle2
from draftsmith.modules.drafters.eagle.trees import DynamicTree, EagleTreeDrafter
from draftsmith.modules.drafters.methods import Method, Models, Named
from draftsmith.modules.types import SamplingParams

PROBE_PROMPTS, PROBE_TOKENS, PROBE_REPEATS = 2, 40, 2
AR = "ar"
TARGET = "target"


@dataclass(frozen=True)
class Overhead:
    """Seconds beyond the forwards: of a round (verification, the loop), and of a draft's step (its stop policy)."""

    round: float
    step: float


@dataclass(frozen=True)
class DecodingCosts:
    """Seconds, medians, on one machine.

    context: tokens that were kept before the rows that were read. start: an answer of one token, prefill and all.
    target, tree: rows -> one call of the target for a chain, for a tree. drafters: `draft`, `eagle`, or `tree/TOPK`.
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

    def seconds(self, trace: DecodeTrace, family: str) -> float:
        """Seconds of one answer with this trace, its prefill included."""
        extra = self.families.get(family, Overhead(0.0, 0.0))
        beyond = len(trace.steps) * extra.round + trace.draft_calls * extra.step
        return self.forward_seconds(trace, family) + beyond

    def forward_seconds(self, trace: DecodeTrace, family: str) -> float:
        """The part that the models' forwards take."""
        drafter = drafter_of(family)
        cost = self.drafters[drafter] if drafter is not None else DraftCost(0.0, 0.0, 0.0)
        is_tree = family.startswith("eagle2/")

        def of_round(step: DecodeStep) -> float:
            read = self.target_s(step.num_drafted + 1, is_tree and step.num_drafted > 1)
            return read + (cost.first + (step.draft_calls - 1) * cost.step if step.draft_calls else 0.0)

        return self.start + cost.prefill + sum(map(of_round, trace.steps))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DecodingCosts:
        curves = {name: {int(rows): s for rows, s in raw[name].items()} for name in ("target", "tree")}
        drafters = {name: DraftCost(**cost) for name, cost in raw["drafters"].items()}
        families = {name: Overhead(**cost) for name, cost in raw["families"].items()}
        return cls(raw["context"], raw["start"], **curves, drafters=drafters, families=families)


def family_of(named: Named) -> str:
    """What methods of equal costs have in common: `spec`, `specdec++/eagle`, `eagle2/8`."""
    name = named.label.partition(":")[0]
    if isinstance(named.method, Eagle2):
        return f"{name}/{named.method.topk}"
    by = named.method.drafter if isinstance(named.method, StopRule) else "draft"
    return name if by == "draft" else f"{name}/{by}"


def drafter_of(family: str) -> str | None:
    """The key of `DecodingCosts.drafters`; None where no model drafts."""
    name, _, more = family.partition("/")
    if name == "eagle2":
        return f"tree/{more}"
    if name in (AR, "pld"):
        return None
    return more or next((drafter for drafter, method in chain_methods().items() if method == name), "draft")


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
    answers = [target_answers.read(prompt, number, 0) for number, prompt in enumerate(typical)]
    ids = [prompt.prompt_ids for prompt in typical]
    context = len(ids[0]) + PROBE_TOKENS // 2
    target, tree = target_curves(models.target, [*ids[0], *answers[0].answer.tokens], context, clock)
    used = dict.fromkeys(sorted(name for name in map(drafter_of, probes) if name is not None))
    drafters = {name: draft_cost(fixed_drafter(name, models), ids, answers, how, clock) for name in used}
    ran = run_probes(models, typical, probes, params, seed, clock)
    start = statistics.median(probe.seconds for probe in ran if probe.family == TARGET)
    bare = DecodingCosts(context, start, target, tree, drafters)
    families = {family: overhead([probe for probe in ran if probe.family == family], bare) for family in probes}
    return replace(bare, families=families)


def typical_prompts(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Those whose lengths are nearest to the mean."""
    mean = statistics.fmean(len(prompt.prompt_ids) for prompt in prompts)
    return sorted(prompts, key=lambda prompt: abs(len(prompt.prompt_ids) - mean))[:PROBE_PROMPTS]


def fixed_drafter(name: str, models: Models) -> Drafter:
    """The drafter of `DecodingCosts.drafters`, without a stop policy of its own."""
    if name.startswith("tree/"):
        topk = int(name.removeprefix("tree/"))
        return EagleTreeDrafter(models.heads["eagle"], models.target, DynamicTree(topk, STEPS, topk), models.capacity)
    return build_chain(models, name, FixedLength(STEPS))


@dataclass(frozen=True)
class Probe:
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
) -> list[Probe]:
    """Every setting on every prompt, interleaved; and answers of one token, as family `target`."""
    made: dict[str, Generation] = {}
    calls: dict[str, Callable[[], None]] = {}
    families: dict[str, str] = {}

    def add(family: str, method: Method | None, num_tokens: int) -> None:
        drafter = None if method is None else method.build(models)
        runner = EngineRunner(models.target, drafter, params, ())
        for prompt in prompts:
            key = str(len(calls))

            def call(key: str = key, prompt: BenchPrompt = prompt) -> None:
                (made[key],) = runner([prompt.prompt_ids], num_tokens, [seed])

            families[key], calls[key] = family, call

    add(TARGET, None, 1)
    for family, methods in probes.items():
        for method in methods:
            add(family, method, PROBE_TOKENS)
    taken = medians(calls, PROBE_REPEATS, clock)
    return [Probe(families[key], made[key], taken[key]) for key in calls]


def overhead(probes: Sequence[Probe], bare: DecodingCosts) -> Overhead:
    """What the answers of one family took beyond their forwards, by rounds and draft steps; neither is less than
    nothing."""
    counts = [(len(probe.made.trace.steps), probe.made.trace.draft_calls) for probe in probes]
    beyond = [probe.seconds - bare.forward_seconds(probe.made.trace, probe.family) for probe in probes]
    return Overhead(*fit_positive(counts, beyond).weights)
