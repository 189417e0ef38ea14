"""Stop policies on the same recorded rounds: of every family dev prompts choose a setting, and the reported prompts say
what it gains. Time is SpecDec++'s cost model with the target call as its unit: 1 a round, c a drafted token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.console import format_interval
from draftsmith.eval.replay import replay
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.eval.studies.forward_times import ratio_interval
from draftsmith.eval.studies.predictors import fitted_probs
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import ConfidenceName, CostRule, ThresholdRule
from draftsmith.modules.decoding.trace import DecodeTrace, Totals, pool
from draftsmith.modules.drafters.chains import by_drafter, chain_methods
from draftsmith.modules.types import SamplingParams

Role = Literal["fixed", "free", "looking", "fitted", "head", "ceiling", "oracle"]
Rule = Literal["k", "t", "entropy", "h", "cost", "oracle"]
Mask = NDArray[np.bool_]
FIXED, EACH, SELF_VERIFY = "fixed K", "q(y) < t, token by token", "self-verify (HSDDW)"
FITTED, KNOWN, ORACLE = "q(y) fitted on dev", "true p/q", "oracle"
ONLINE_REPEATS, ONLINE_Q, ONLINE_MAX_Q = "online, q(y) and repeats", "online, q(y)", "online, max q"
# What the online fit learns from: whose confidence, and whether repetitions of the text count.
ONLINE: dict[str, tuple[ConfidenceName, bool]] = {
    ONLINE_REPEATS: ("q", True),
    ONLINE_Q: ("q", False),
    ONLINE_MAX_Q: ("max_q", False),
}
RAW = ", raw"  # behind a head's name: its output as it is
ON_TOP = ", online on top"  # the same: what learns from the verdicts how far to trust it
COPYING = 0.2  # share of an answer's tokens that go on with a repetition, from which on it copies
PUBLISHED_H, PUBLISHED_MIN = 0.7, 2
AS_PUBLISHED = ": raw, h 0.7 as published"


@dataclass(frozen=True)
class Policy:
    """One setting. value: K, t or h. predictor: whose probabilities it goes by, by name, where it goes by any."""

    rule: Rule
    value: float = 0.0
    predictor: str = ""
    minimum: int = 1
    maximum: int = 0

    @property
    def label(self) -> str:
        """The setting, short."""
        if self.rule == "k":
            return f"K={self.value:g}"
        named = f"{self.rule}={self.value:g}, " if self.rule in "th" else ""
        return f"{named}max {self.maximum}" if self.maximum else ""

    @property
    def head(self) -> str:
        """Name of the head whose probabilities it goes by."""
        return self.predictor.removesuffix(RAW).removesuffix(ON_TOP)

    def method(self, drafter: str, c: float) -> str | None:
        """Name of the method in `eval bench`, a head is passed beside it; None for what no decoder can run."""
        by = by_drafter(drafter)
        limits = f"min={self.minimum}:max={self.maximum}{by}"
        if self.rule == "k":
            return f"{chain_methods()[drafter]}:k={self.value:g}"
        if self.rule == "entropy":
            return f"self-verify:k={self.maximum}{by}"
        if self.rule == "t":
            return f"confidence:t={self.value:g}:{limits}"
        if self.predictor in ONLINE:
            confidence, repeats = ONLINE[self.predictor]
            return f"online:by={confidence}:repeats={'on' if repeats else 'off'}:c={c:.3g}:{limits}"
        if self.predictor.endswith(ON_TOP):
            return f"online:head=on:c={c:.3g}:{limits}"
        if self.predictor in (FITTED, KNOWN, ""):
            return None
        if self.rule == "cost":
            return f"cost:c={c:.3g}:{limits}"
        return f"specdec++:h={self.value:g}:{limits}{'' if self.predictor.endswith(RAW) else ':calibrated=on'}"


@dataclass(frozen=True)
class PolicyFamily:
    """Settings of which one is chosen on dev prompts. role: what it is in the comparison. `free` and `looking`
    need no training: the first go by the draft's confidence alone, the second look for repetitions of the text too."""

    name: str
    role: Role
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class PolicyGrid:
    """Settings that are chosen from. maxima: longest drafts, of all but the fixed."""

    ks: tuple[int, ...]
    ts: tuple[float, ...]
    hs: tuple[float, ...]
    maxima: tuple[int, ...]

    def families(self, heads: Mapping[str, AcceptanceHead], knows_p: bool) -> list[PolicyFamily]:
        """knows_p: p/q of every drafted token was recorded."""
        found: list[PolicyFamily] = []

        def add(name: str, role: Role, *policies: Policy) -> None:
            found.append(PolicyFamily(name, role, policies))

        def by_threshold(name: str, role: Role, predictor: str) -> None:
            add(name, role, *(Policy("h", h, predictor, maximum=most) for most in self.maxima for h in self.hs))

        def by_cost(name: str, role: Role, predictor: str) -> None:
            add(name, role, *(Policy("cost", predictor=predictor, maximum=most) for most in self.maxima))

        add(FIXED, "fixed", *(Policy("k", k) for k in self.ks))
        add(EACH, "free", *(Policy("t", t, maximum=most) for most in self.maxima for t in self.ts))
        add(SELF_VERIFY, "free", *(Policy("entropy", maximum=most) for most in self.maxima))
        for name, (_, repeats) in ONLINE.items():
            by_cost(f"{name}, cost rule", "looking" if repeats else "free", name)
        by_threshold(f"{FITTED}, threshold", "fitted", FITTED)
        by_cost(f"{FITTED}, cost rule", "fitted", FITTED)
        for name, head in heads.items():
            weighted = head.config.w_rej != head.config.w_acc
            if weighted and head.config.as_published:  # what SpecDec++'s head reads, and what its threshold is for
                deepest = max(self.maxima)
                as_published = Policy("h", PUBLISHED_H, name + RAW, min(PUBLISHED_MIN, deepest), deepest)
                add(name + AS_PUBLISHED, "head", as_published)
            if weighted:
                by_threshold(f"{name}: raw, threshold", "head", name + RAW)
            by_threshold(f"{name}: calibrated, threshold", "head", name)
            by_cost(f"{name}: calibrated, cost rule", "head", name)
            by_cost(f"{name}{ON_TOP}, cost rule", "head", name + ON_TOP)
        if knows_p:
            by_cost(f"{KNOWN}, cost rule", "ceiling", KNOWN)
        add(ORACLE, "oracle", Policy("oracle"))
        return found


@dataclass(frozen=True)
class DrafterMode:
    """One drafter at one temperature, with the heads whose labels are of that mode; rounds of dev and reported
    prompts."""

    drafter: str
    params: SamplingParams
    heads: Mapping[str, AcceptanceHead]
    dev: ChainRollouts
    test: ChainRollouts

    @property
    def mode(self) -> str:
        return "greedy" if self.params.greedy else f"T={self.params.temperature:g}"

    @property
    def title(self) -> str:
        who = "draft model" if self.drafter == "draft" else f"{self.drafter.upper()} chain"
        return f"{who}, {self.mode}"

    def probs(self, rollouts: ChainRollouts) -> dict[str, Floats]:
        """[S, K] of every predictor that learns nothing, by name; what is fitted is fitted on the dev prompts."""
        found = {FITTED: fitted_probs(rollouts, self.dev)}
        for name, head in self.heads.items():
            for suffix, calibrated in ((RAW, False), ("", True)):
                found[name + suffix] = replay.head_probs(rollouts.heads[name], head, calibrated)
        return found | ({} if rollouts.accept_along is None else {KNOWN: rollouts.accept_along})


class PolicyReplay:
    """Replays policies on the rounds of some prompts; what was replayed once is remembered."""

    def __init__(self, scene: DrafterMode, rollouts: ChainRollouts):
        """rollouts: of the scene's dev or reported prompts."""
        self.rollouts = rollouts
        self._known = {}
        for name, probs in scene.probs(rollouts).items():
            head = scene.heads.get(name.removesuffix(RAW))
            self._known[name] = replay.KnownPredictor(probs, head is not None and head.config.late)
        self._replayed: dict[tuple[Policy, float], tuple[list[DecodeTrace], Floats]] = {}

    def predictor(self, name: str) -> replay.RecordedPredictor:
        """One that has learned nothing yet."""
        if name.endswith(ON_TOP):
            return replay.RecordedOnline(self.rollouts, head=self._known[name.removesuffix(ON_TOP)])
        return replay.RecordedOnline(self.rollouts, *ONLINE[name]) if name in ONLINE else self._known[name]

    def traces(self, policy: Policy, c: float) -> list[DecodeTrace]:
        """One an answer."""
        return self._replay(policy, c)[0]

    def pairs(self, policy: Policy, c: float) -> Floats:
        """[prompts, 2]: tokens, and their time in target calls, 1 a round and c a drafted token."""
        tokens, calls, drafted = self._replay(policy, c)[1].T
        return np.stack([tokens, calls + c * drafted], 1)

    def rate(self, policy: Policy, c: float) -> float:
        """Tokens by time, a ratio of sums."""
        return rate(self.pairs(policy, c))

    def best(self, policies: Sequence[Policy], c: float) -> Policy:
        """The fastest, the first of equals."""
        return max(policies, key=lambda policy: self.rate(policy, c))

    def _replay(self, policy: Policy, c: float) -> tuple[list[DecodeTrace], Floats]:
        """Traces, and their tokens, target calls and drafted tokens [prompts, 3]."""
        key = policy, c if policy.rule == "cost" else 0.0  # what the others draft does not depend on c
        if key not in self._replayed:
            traces = self._traces(policy, c)
            counts = [(own.num_tokens, own.num_target_calls, own.num_draft_tokens) for own in traces]
            self._replayed[key] = traces, np.array(counts, float)
        return self._replayed[key]

    def _traces(self, policy: Policy, c: float) -> list[DecodeTrace]:
        rollouts, limits = self.rollouts, (policy.minimum, policy.maximum)
        if policy.rule == "k":
            return replay.replay(rollouts, replay.fixed_k(rollouts, int(policy.value)))
        if policy.rule == "t":
            return replay.replay(rollouts, replay.confidence_lengths(rollouts, policy.value, *limits))
        if policy.rule == "entropy":
            return replay.self_verify(rollouts, policy.maximum)
        if policy.rule == "oracle":
            return replay.replay(rollouts, replay.oracle(rollouts))
        rule = ThresholdRule(policy.value) if policy.rule == "h" else CostRule(c)
        return replay.replay_by_prediction(rollouts, self.predictor(policy.predictor), rule, *limits)


def rate(pairs: Floats) -> float:
    """Tokens by time, a ratio of sums."""
    tokens, time = pairs.sum(0)
    return float(tokens / time)


@dataclass(frozen=True)
class Gain:
    """Relative gain in tokens by time, with the ends of its 95 % interval, NaN for fewer than two prompts."""

    value: float
    low: float = np.nan
    high: float = np.nan

    @property
    def text(self) -> str:
        """The gain as tables write it."""
        return f"{self.value:+.1%} ({self.ends})" if self.ends else f"{self.value:+.1%}"

    @property
    def ends(self) -> str:
        """The interval alone."""
        return format_interval((self.low, self.high), "+.1%", " to ")


def gain(own: Floats, base: Floats, seed: int) -> Gain:
    """own, base [prompts, 2] as `PolicyReplay.pairs`; prompts are resampled in pairs."""
    return Gain(rate(own) / rate(base) - 1, *(ratio_interval(own, base, seed) or ()))


@dataclass(frozen=True)
class Chosen:
    """A family's setting, and its gain over the best fixed K on the prompts that it was chosen on."""

    family: PolicyFamily
    policy: Policy
    dev_gain: float


@dataclass(frozen=True)
class AtCost:
    """Settings chosen at one c, by family. own: c is this machine's."""

    c: float
    own: bool
    chosen: Mapping[str, Chosen]

    def best(self, role: Role) -> Chosen | None:
        """The best of a role's families on dev prompts."""
        return max(self.of(role), key=lambda item: item.dev_gain, default=None)

    def of(self, role: Role) -> list[Chosen]:
        return [item for item in self.chosen.values() if item.family.role == role]

    @property
    def fixed(self) -> Chosen:
        return self.chosen[FIXED]

    @property
    def name(self) -> str:
        """Name of this c in tables."""
        return f"{self.c:.3g}{' (here)' if self.own else ''}"


@dataclass(frozen=True)
class PolicyComparison:
    """Settings chosen for one drafter and mode at every c, this machine's last. test: replays the reported prompts.
    overlaps [prompts]: of the reported ones, the share of their answers' n-grams that heads were trained on. copied
    [prompts]: the share of their answers' tokens that go on with a repetition."""

    scene: DrafterMode
    at: Sequence[AtCost]
    test: PolicyReplay
    overlaps: Sequence[float]
    copied: Sequence[float]
    seed: int

    @property
    def own(self) -> AtCost:
        """The comparison at this machine's c."""
        return self.at[-1]

    @cached_property
    def tasks(self) -> NDArray[np.str_]:
        """Tasks of the reported prompts."""
        return np.array([answer.task for answer in self.scene.test.answers], np.str_)

    @cached_property
    def least_known(self) -> Mask:
        """[prompts]: the third (rounded up) with the least overlap, of equal ones the first."""
        order = np.argsort(np.asarray(self.overlaps), kind="stable")
        return np.isin(np.arange(len(order)), order[: -(-len(order) // 3)])

    @cached_property
    def copies(self) -> Mask:
        """[prompts]: those whose answers go on with a repetition in more than COPYING of their tokens."""
        return np.asarray(self.copied) > COPYING

    def gain(self, at: AtCost, own: Chosen, base: Chosen | None = None, mask: Mask | None = None) -> Gain:
        """Over the best fixed K, or another; of the prompts in the mask."""
        kept = slice(None) if mask is None else mask
        pairs, others = (self.test.pairs(chosen.policy, at.c)[kept] for chosen in (own, base or at.fixed))
        return gain(pairs, others, self.seed)

    def totals(self, at: AtCost, policy: Policy, first: int | None = None) -> Totals:
        """Counts over the reported prompts, or over the first so many."""
        return pool(self.test.traces(policy, at.c)[:first])


def compare_policies(
    scene: DrafterMode,
    grid: PolicyGrid,
    cs: Sequence[float],
    overlaps: Sequence[float],
    copied: Sequence[float],
    seed: int,
) -> PolicyComparison:
    """cs: the last one is this machine's own."""
    families = grid.families(scene.heads, scene.dev.accept_along is not None)
    dev = PolicyReplay(scene, scene.dev)
    at = []
    for number, c in enumerate(cs, 1):
        best = {family: dev.best(family.policies, c) for family in families}
        base = dev.rate(best[families[0]], c)  # fixed K
        chosen = {family.name: Chosen(family, own, dev.rate(own, c) / base - 1) for family, own in best.items()}
        at.append(AtCost(c, number == len(cs), chosen))
    return PolicyComparison(scene, at, PolicyReplay(scene, scene.test), overlaps, copied, seed)
