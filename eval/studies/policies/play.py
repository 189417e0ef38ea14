"""Stop policies on recorded rounds: families of settings, their counts, and what they gain in SpecDec++'s cost model
with the target call as the unit of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from draftsmith.eval.replay import replay
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.eval.replay.stop_rules import KnownPredictor, RecordedOnline, RecordedPredictor, replay_by_prediction
from draftsmith.eval.studies.forward_times import ratio_interval
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import ConfidenceName, CostRule, ThresholdRule
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.decoding.trace import DecodeTrace, pool
from draftsmith.modules.drafters.chains import by_drafter, chain_methods
from draftsmith.modules.metrics import fit_platt

Role = Literal["fixed", "free", "looking", "fitted", "head", "ceiling", "oracle"]
Rule = Literal["k", "t", "entropy", "h", "cost", "oracle"]
FIXED, EACH, SELF_VERIFY = "fixed K", "q(y) < t, token by token", "self-verify (HSDDW)"
FITTED, KNOWN = "q(y) fitted on dev", "true p/q"
ONLINE_REPEATS, ONLINE_Q, ONLINE_MAX_Q = "online, q(y) and repeats", "online, q(y)", "online, max q"
# What the online fit learns from: whose confidence, and whether repetitions of the text count.
ONLINE: dict[str, tuple[ConfidenceName, bool]] = {
    ONLINE_REPEATS: ("q", True),
    ONLINE_Q: ("q", False),
    ONLINE_MAX_Q: ("max_q", False),
}
ORACLE = "oracle"
RAW = ", raw"  # behind a head's name: its output as it is
PUBLISHED_H, PUBLISHED_MIN = 0.7, 2
AS_PUBLISHED = ": raw, h 0.7 as published"


@dataclass(frozen=True)
class Policy:
    """One setting. value: K, t or h. judge: who judges, by name, where somebody does."""

    rule: Rule
    value: float = 0.0
    judge: str = ""
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
    def of_time(self) -> bool:
        """What it drafts depends on c."""
        return self.rule == "cost"

    def method(self, drafter: str, c: float) -> str | None:
        """As `eval bench` calls it, a head is passed beside it; None for what no decoder can run."""
        by = by_drafter(drafter)
        limits = f"min={self.minimum}:max={self.maximum}{by}"
        if self.rule == "k":
            return f"{chain_methods()[drafter]}:k={self.value:g}"
        if self.rule == "entropy":
            return f"self-verify:k={self.maximum}{by}"
        if self.rule == "t":
            return f"confidence:t={self.value:g}:{limits}"
        if self.judge in ONLINE:
            confidence, repeats = ONLINE[self.judge]
            return f"online:by={confidence}:repeats={'on' if repeats else 'off'}:c={c:.3g}:{limits}"
        if self.judge in (FITTED, KNOWN, ""):
            return None
        if self.rule == "cost":
            return f"cost:c={c:.3g}:{limits}"
        return f"specdec++:h={self.value:g}:{limits}{'' if self.judge.endswith(RAW) else ':calibrated=on'}"

    @property
    def head(self) -> str:
        """Of a head's policy its name."""
        return self.judge.removesuffix(RAW)


@dataclass(frozen=True)
class Family:
    """Settings of which one is chosen on dev prompts. role: what it is in the comparison. `free` and `looking`
    need no training: the first go by the draft's confidence alone, the second look for repetitions of the text too."""

    name: str
    role: Role
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class Grid:
    """What is chosen from. maxima: longest drafts, of all but the fixed."""

    ks: tuple[int, ...]
    ts: tuple[float, ...]
    hs: tuple[float, ...]
    maxima: tuple[int, ...]

    def families(self, heads: Mapping[str, AcceptanceHead], knows_p: bool) -> list[Family]:
        """knows_p: p/q of every drafted token was recorded."""

        def thresholds(judge: str) -> tuple[Policy, ...]:
            return tuple(Policy("h", h, judge, maximum=most) for most in self.maxima for h in self.hs)

        def cost(judge: str) -> tuple[Policy, ...]:
            return tuple(Policy("cost", judge=judge, maximum=most) for most in self.maxima)

        deepest = max(self.maxima)
        found = [
            Family(FIXED, "fixed", tuple(Policy("k", k) for k in self.ks)),
            Family(EACH, "free", tuple(Policy("t", t, maximum=most) for most in self.maxima for t in self.ts)),
            Family(SELF_VERIFY, "free", tuple(Policy("entropy", maximum=most) for most in self.maxima)),
            *(
                Family(f"{name}, cost rule", "looking" if repeats else "free", cost(name))
                for name, (_, repeats) in ONLINE.items()
            ),
            Family(f"{FITTED}, threshold", "fitted", thresholds(FITTED)),
            Family(f"{FITTED}, cost rule", "fitted", cost(FITTED)),
        ]
        for name, head in heads.items():
            if is_published_style(head):
                as_published = Policy("h", PUBLISHED_H, name + RAW, min(PUBLISHED_MIN, deepest), deepest)
                found.append(Family(name + AS_PUBLISHED, "head", (as_published,)))
            if head.config.w_rej != head.config.w_acc:
                found.append(Family(f"{name}: raw, threshold", "head", thresholds(name + RAW)))
            found.append(Family(f"{name}: calibrated, threshold", "head", thresholds(name)))
            found.append(Family(f"{name}: calibrated, cost rule", "head", cost(name)))
        if knows_p:
            found.append(Family(f"{KNOWN}, cost rule", "ceiling", cost(KNOWN)))
        return [*found, Family(ORACLE, "oracle", (Policy("oracle"),))]


def is_published_style(head: AcceptanceHead) -> bool:
    """Reads what SpecDec++'s head reads, and was trained with a weight that its threshold is for."""
    return head.config.as_published and head.config.w_rej != head.config.w_acc


def judges_of(
    rollouts: ChainRollouts, fit: ChainRollouts, heads: Mapping[str, AcceptanceHead]
) -> dict[str, Callable[[], RecordedPredictor]]:
    """Name -> a fresh judge. fit: what the logistic model of q(y) is fitted to."""
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


def fitted_probs(rollouts: ChainRollouts, fit: ChainRollouts) -> Floats:
    """[S, K]: a logistic model of the log-odds of q(y), fitted to the labelled tokens of `fit`."""
    labelled = fit.judged()
    scale, bias = fit_platt(
        log_odds_of(torch.from_numpy(fit.log_q[labelled])), torch.from_numpy(fit.accept_prob[labelled])
    )
    return torch.sigmoid(scale * log_odds_of(torch.from_numpy(rollouts.log_q)) + bias).numpy()


class Player:
    """Plays policies on the rounds of some prompts; what was played once is remembered."""

    def __init__(self, rollouts: ChainRollouts, judges: Mapping[str, Callable[[], RecordedPredictor]]):
        self.rollouts, self._judges = rollouts, judges
        self._played: dict[tuple[Policy, float], list[DecodeTrace]] = {}
        self._counts: dict[tuple[Policy, float], Floats] = {}

    def traces(self, policy: Policy, c: float) -> list[DecodeTrace]:
        """One an answer."""
        key = policy, c if policy.of_time else 0.0
        if key not in self._played:
            self._played[key] = self._play(policy, c)
        return self._played[key]

    def _play(self, policy: Policy, c: float) -> list[DecodeTrace]:
        rollouts = self.rollouts
        if policy.rule == "k":
            return replay.replay(rollouts, replay.fixed_k(rollouts, int(policy.value)))
        if policy.rule == "t":
            lengths = replay.confidence(rollouts, policy.value, policy.minimum, policy.maximum)
            return replay.replay(rollouts, lengths)
        if policy.rule == "entropy":
            return replay.self_verify(rollouts, policy.maximum)
        if policy.rule == "oracle":
            return replay.replay(rollouts, replay.oracle(rollouts))
        rule = ThresholdRule(policy.value) if policy.rule == "h" else CostRule(c)
        return replay_by_prediction(rollouts, self._judges[policy.judge](), rule, policy.minimum, policy.maximum)

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
        """As tables write it."""
        ends = "" if np.isnan(self.low) else f" ({self.low:+.1%} to {self.high:+.1%})"
        return f"{self.value:+.1%}{ends}"


def gain(own: Floats, base: Floats, seed: int, mask: Sequence[bool] | np.ndarray | None = None) -> Gain:
    """own, base [prompts, 2] as `Player.pairs`; prompts are resampled in pairs. mask [prompts]: of those that count."""
    if mask is not None:
        own, base = own[np.asarray(mask)], base[np.asarray(mask)]
    return Gain(rate(own) / rate(base) - 1, *(ratio_interval(own, base, seed) or (np.nan, np.nan)))
