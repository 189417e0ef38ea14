"""Rollouts of all drafters of one target, and what replaying them says of a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.replay import replay
from draftsmith.eval.replay.replay import KnownPredictor, RecordedOnline, RecordedPredictor, replay_by_prediction
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer, TreeRollouts
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.chains import (
    ByPrediction,
    ConfidenceStop,
    FixedK,
    Online,
    SelfVerification,
    SpecDecPlusPlus,
)
from draftsmith.modules.drafters.methods import Models, Named
from draftsmith.modules.drafters.prompt_lookup import PromptLookup
from draftsmith.modules.drafters.trees import DynamicTrees

HEAD = "acceptance"  # label of its logits in the rollouts


@dataclass(frozen=True)
class Recorded:
    """Rollouts by what drafted them: chains by `draft` or a head's kind, trees by `NAME/TOPK` of their method, lookups
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
            return replay.replay_tree(
                self.trees[f"{named.label.partition(':')[0]}/{method.topk}"], method.nodes, method.depth
            )
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
