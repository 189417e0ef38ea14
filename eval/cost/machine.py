"""What decoding costs on this machine, piece by piece: forwards of the target by rows, draft steps, and what a round
takes beyond them. From these and a trace the seconds of decoding follow, without decoding (SpecDec++, section 2: T =
t_draft N_draft + t_target N_target, here with t_target by the rows that are read)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from draftsmith.modules.drafters.chains import Chain, StopRule, build_chains
from draftsmith.modules.drafters.methods import Autoregressive, DynamicTrees, Method, Models, Named
from draftsmith.modules.types import SamplingParams

PROBE_PROMPTS, PROBE_TOKENS, PROBE_REPEATS = 2, 40, 2
START = "start"


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
    answers = [target_answers.read(prompt, number, 0) for number, prompt in enumerate(typical)]
    ids = [prompt.prompt_ids for prompt in typical]
    context = len(ids[0]) + PROBE_TOKENS // 2
    target, tree = target_curves(models.target, [*ids[0], *answers[0].answer.tokens], context, clock)
    used = {name: methods[0] for methods in probes.values() if (name := drafter_of(methods[0])) is not None}
    drafters = {name: draft_cost(fixed_drafter(models, used[name]), ids, answers, how, clock) for name in sorted(used)}
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
    made: dict[str, Generation] = {}
    calls: dict[str, Callable[[], None]] = {}
    settings: dict[str, tuple[str, Method]] = {}

    def add(family: str, method: Method, num_tokens: int) -> None:
        runner = EngineRunner(models.target, method.build(models), params, ())
        for prompt in prompts:
            key = str(len(calls))

            def call(key: str = key, prompt: BenchPrompt = prompt) -> None:
                (made[key],) = runner([prompt.prompt_ids], num_tokens, [seed])

            settings[key], calls[key] = (family, method), call

    add(START, Autoregressive(), 1)
    for family, methods in probes.items():
        for method in methods:
            add(family, method, PROBE_TOKENS)
    taken = medians(calls, PROBE_REPEATS, clock)
    return [TimedAnswer(*settings[key], made[key], taken[key]) for key in calls]


def overhead(probes: Sequence[TimedAnswer], bare: DecodingCosts) -> Overhead:
    """What the answers of one family took beyond their forwards, by rounds and draft steps; neither is less than
    nothing."""
    counts = [(len(probe.made.trace.steps), probe.made.trace.draft_calls) for probe in probes]
    beyond = [probe.seconds - bare.forward_seconds(probe.made.trace, probe.method) for probe in probes]
    return Overhead(*fit_positive(counts, beyond).weights)
