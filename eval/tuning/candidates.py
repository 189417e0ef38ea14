"""The settings that are weighed against each other, and what rollouts say of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.cost.machine import DecodingCosts, family_of
from draftsmith.eval.replay import replay
from draftsmith.eval.replay.replay import KnownPredictor, RecordedOnline, RecordedPredictor, replay_by_prediction
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer, TreeRollouts
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
from draftsmith.modules.decoding.tree import MAX_NODES, num_candidates
from draftsmith.modules.drafters.chains import (
    ByPrediction,
    ConfidenceStop,
    FixedK,
    Online,
    SelfVerification,
    SpecDecPlusPlus,
    by_drafter,
    chain_methods,
)
from draftsmith.modules.drafters.methods import Models, Named, parse_methods
from draftsmith.modules.drafters.prompt_lookup import PromptLookup
from draftsmith.modules.drafters.trees import DynamicTrees, tree_methods

HEAD = "acceptance"  # label of its logits in the rollouts
# Settings are weighed at these values.
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
NGRAMS = (2, 3)
NODES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60)


@dataclass(frozen=True)
class Grid:
    """depth: longest chain. tree_depth: most expansions of a tree. topks: its widths."""

    depth: int
    tree_depth: int
    topks: tuple[int, ...]

    def settings(self, given: Collection[str], reader: str | None) -> list[Named]:
        """Every setting that the given drafters allow. reader: the one that an acceptance head was trained for."""
        return parse_methods(",".join(self._labels(given, reader)))

    def _labels(self, given: Collection[str], reader: str | None) -> Iterator[str]:
        lengths = range(1, self.depth + 1)
        longest = sorted({self.depth, max(self.depth // 2, 1)}, reverse=True)
        limits = [f"min={least}:max={m}" for m in longest for least in (1, 2) if least <= m]
        yield BASELINE
        yield from (f"pld:k={k}:ngram={ngram}" for k in lengths[1::2] for ngram in NGRAMS)
        for drafter, fixed in chain_methods().items():
            if drafter not in given:
                continue
            own = by_drafter(drafter)
            yield from (f"{fixed}:k={k}" for k in lengths)
            yield from (f"confidence:t={t}:max={m}{own}" for t in THRESHOLDS[:9] for m in longest)
            yield from (f"self-verify:k={m}{own}" for m in longest)
            yield from (f"online:max={m}:by={by}{own}" for m in longest for by in ("q", "max_q"))
            if drafter == reader:
                yield from (
                    f"specdec++:h={h}:{within}:calibrated={calibrated}{own}"
                    for calibrated in ("off", "on")
                    for h in THRESHOLDS
                    for within in limits
                )
                yield from (f"cost:{within}{own}" for within in limits)
                yield from (f"online:head=on:max={m}{own}" for m in longest)
        for name in (name for kind, name in tree_methods().items() if kind in given):
            for topk in self.topks:
                for depth in range(1, self.tree_depth + 1):
                    most = min(num_candidates(topk, depth + 1), MAX_NODES)
                    yield from (f"{name}:nodes={n}:depth={depth}:topk={topk}" for n in NODES if n <= most)


@dataclass(frozen=True)
class Recorded:
    """Rollouts by what drafted them: chains by `draft` or a head's kind, trees by their family (`family_of`), lookups
    by their longest n-gram. models: the acceptance head, and c of each drafter of chains on this machine."""

    chains: Mapping[str, ChainRollouts]
    trees: Mapping[str, TreeRollouts]
    models: Models | None
    lookups: Mapping[int, ChainRollouts] = field(default_factory=dict)

    @property
    def answers(self) -> list[TargetAnswer]:
        """The target's, which all rollouts share."""
        rollouts: list[ChainRollouts | TreeRollouts] = [*self.chains.values(), *self.trees.values()]
        return rollouts[0].answers

    def traces(self, named: Named) -> list[DecodeTrace]:
        """What decoding with these settings does, one trace an answer."""
        method = named.method
        if named.label == BASELINE:
            return [alone(answer) for answer in self.answers]
        if isinstance(method, DynamicTrees):
            assert method.by_values and method.nodes != "auto" and method.depth != "auto"
            return replay.replay_tree(self.trees[family_of(named)], method.nodes, method.depth)
        if isinstance(method, PromptLookup):
            lookups = self.lookups[method.ngram]
            return replay.replay(lookups, replay.fixed_k(lookups, method.k), calls_per_token=0)
        rollouts = self.chains[method.needs[0]]
        if isinstance(method, ByPrediction):
            assert self.models is not None
            predictor, rule = recorded_predictor(method, rollouts, self.models), method.rule(self.models, 1)
            return replay_by_prediction(rollouts, predictor, rule, method.min, method.max)
        if isinstance(method, SelfVerification):
            return replay.self_verify(rollouts, method.k)
        if isinstance(method, ConfidenceStop):
            lengths = replay.confidence_lengths(rollouts, method.t, method.min, method.max)
            return replay.replay(rollouts, lengths)
        assert isinstance(method, FixedK)
        return replay.replay(rollouts, replay.fixed_k(rollouts, method.k))


def recorded_predictor(method: ByPrediction, rollouts: ChainRollouts, models: Models) -> RecordedPredictor:
    head = None
    if "acceptance" in method.needs:
        assert models.acceptance is not None
        calibrated = not isinstance(method, SpecDecPlusPlus) or method.calibrated
        probs = replay.head_probs(rollouts.heads[HEAD], models.acceptance, calibrated)
        head = KnownPredictor(probs, late=models.acceptance.config.late)
    if isinstance(method, Online):
        return RecordedOnline(rollouts, method.by, method.repeats, head)
    assert head is not None
    return head


def alone(answer: TargetAnswer) -> DecodeTrace:
    """Decoding without a drafter."""
    return DecodeTrace([DecodeStep(0, 0, 1, 0)] * (len(answer.tokens) - 1), prefill_emitted=1)


@dataclass(frozen=True)
class Predicted:
    """One setting, and what is expected of it."""

    named: Named
    family: str
    tau: float
    tokens_per_s: float

    @property
    def label(self) -> str:
        return self.named.label


def predict(settings: Sequence[Named], recorded: Recorded, costs: DecodingCosts) -> list[Predicted]:
    """Every setting's speed: tokens by seconds, both summed over the answers."""
    found = []
    for named in settings:
        traces, family = recorded.traces(named), family_of(named)
        totals = pool(traces)
        took = float(np.sum([costs.seconds(trace, named) for trace in traces]))
        found.append(Predicted(named, family, totals.tau, totals.num_tokens / took))
    return found


def best_of_families(predicted: Sequence[Predicted]) -> list[Predicted]:
    """The fastest lossless setting of every family, fastest first."""
    best: dict[str, Predicted] = {}
    for item in (item for item in predicted if item.named.method.lossless):
        if item.family not in best or item.tokens_per_s > best[item.family].tokens_per_s:
            best[item.family] = item
    return sorted(best.values(), key=lambda item: -item.tokens_per_s)


def probes(settings: Sequence[Named]) -> dict[str, list[Named]]:
    """Family -> two of its settings that draft little and much, by which its costs are told apart."""
    by_family: dict[str, list[Named]] = {}
    for named in settings:
        by_family.setdefault(family_of(named), []).append(named)
    # Settings go from short drafts to long ones: one from each side of the middle.
    return {
        family: [named[place] for place in sorted({len(named) // 4, 3 * len(named) // 4})]
        for family, named in by_family.items()
    }
