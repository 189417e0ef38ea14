"""Stop policies on recorded rounds: their counts, and what they gain in SpecDec++'s cost model with the target call as
the unit of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from draftsmith.eval.replay import replay
from draftsmith.eval.replay.replay import KnownPredictor, RecordedOnline, RecordedPredictor, replay_by_prediction
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.eval.report.tables import interval
from draftsmith.eval.studies.forward_times import ratio_interval
from draftsmith.eval.studies.policies.families import FITTED, KNOWN, ONLINE, RAW, Policy
from draftsmith.eval.studies.predictors import fitted_probs
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import CostRule, ThresholdRule
from draftsmith.modules.decoding.trace import DecodeTrace, pool


def predictors_of(
    rollouts: ChainRollouts, fit: ChainRollouts, heads: Mapping[str, AcceptanceHead]
) -> dict[str, Callable[[], RecordedPredictor]]:
    """Name -> a fresh predictor. fit: what the logistic model of q(y) is fitted to."""
    known: dict[str, KnownPredictor] = {FITTED: KnownPredictor(fitted_probs(rollouts, fit), late=False)}
    for name, head in heads.items():
        for suffix, calibrated in (("", True), (RAW, False)):
            probs = replay.head_probs(rollouts.heads[name], head, calibrated)
            known[name + suffix] = KnownPredictor(probs, head.config.late)
    if rollouts.accept_along is not None:
        known[KNOWN] = KnownPredictor(rollouts.accept_along, late=False)

    def fresh(name: str) -> RecordedPredictor:
        return RecordedOnline(rollouts, *ONLINE[name]) if name in ONLINE else known[name]

    return {name: partial(fresh, name) for name in (*known, *ONLINE)}


class PolicyReplay:
    """Replays policies on the rounds of some prompts; what was replayed once is remembered."""

    def __init__(self, rollouts: ChainRollouts, predictors: Mapping[str, Callable[[], RecordedPredictor]]):
        self.rollouts, self._predictors = rollouts, predictors
        self._traces: dict[tuple[Policy, float], list[DecodeTrace]] = {}
        self._counts: dict[tuple[Policy, float], Floats] = {}

    def traces(self, policy: Policy, c: float) -> list[DecodeTrace]:
        """One an answer."""
        key = policy, c if policy.of_time else 0.0
        if key not in self._traces:
            self._traces[key] = self._replay(policy, c)
        return self._traces[key]

    def _replay(self, policy: Policy, c: float) -> list[DecodeTrace]:
        rollouts = self.rollouts
        if policy.rule == "k":
            return replay.replay(rollouts, replay.fixed_k(rollouts, int(policy.value)))
        if policy.rule == "t":
            lengths = replay.confidence_lengths(rollouts, policy.value, policy.minimum, policy.maximum)
            return replay.replay(rollouts, lengths)
        if policy.rule == "entropy":
            return replay.self_verify(rollouts, policy.maximum)
        if policy.rule == "oracle":
            return replay.replay(rollouts, replay.oracle(rollouts))
        rule = ThresholdRule(policy.value) if policy.rule == "h" else CostRule(c)
        predictor = self._predictors[policy.predictor]()
        return replay_by_prediction(rollouts, predictor, rule, policy.minimum, policy.maximum)

    def pairs(self, policy: Policy, c: float) -> Floats:
        """[prompts, 2]: tokens, and their time in target calls, 1 a round and c a drafted token."""
        key = policy, c if policy.of_time else 0.0
        if key not in self._counts:
            totals = [pool([trace]) for trace in self.traces(policy, c)]
            self._counts[key] = np.array(
                [(own.num_tokens, own.num_target_calls, own.num_draft_tokens) for own in totals], float
            )
        tokens, calls, drafted = self._counts[key].T
        return np.stack([tokens, calls + c * drafted], 1)

    def best(self, policies: Iterable[Policy], c: float) -> Policy:
        """The fastest, the first of equals."""
        return max(policies, key=lambda policy: rate(self.pairs(policy, c)))


def rate(pairs: Floats) -> float:
    """Tokens by time, a ratio of sums."""
    tokens, time = pairs.sum(0)
    return float(tokens / time)


@dataclass(frozen=True)
class Gain:
    """Relative gain in tokens by time, with the ends of its 95 % interval, NaN for fewer than two prompts."""

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The gain as tables write it."""
        return f"{self.value:+.1%} ({self.ends})" if self.ends else f"{self.value:+.1%}"

    @property
    def ends(self) -> str:
        """The interval alone."""
        return interval((self.low, self.high), "+.1%", " to ")


def gain(own: Floats, base: Floats, seed: int, mask: Sequence[bool] | np.ndarray | None = None) -> Gain:
    """own, base [prompts, 2] as `PolicyReplay.pairs`; prompts are resampled in pairs. mask [prompts]: those that
    count."""
    if mask is not None:
        own, base = own[np.asarray(mask)], base[np.asarray(mask)]
    return Gain(rate(own) / rate(base) - 1, *(ratio_interval(own, base, seed) or (np.nan, np.nan)))
