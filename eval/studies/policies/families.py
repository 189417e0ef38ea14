"""Stop policies that are compared: families of settings, of which dev prompts choose one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import ConfidenceName
from draftsmith.modules.drafters.chains import by_drafter, chain_methods

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
    def of_time(self) -> bool:
        """Whether what it drafts depends on c."""
        return self.rule == "cost"

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
        if self.predictor in (FITTED, KNOWN, ""):
            return None
        if self.rule == "cost":
            return f"cost:c={c:.3g}:{limits}"
        return f"specdec++:h={self.value:g}:{limits}{'' if self.predictor.endswith(RAW) else ':calibrated=on'}"

    @property
    def head(self) -> str:
        """Name of the head whose probabilities it goes by."""
        return self.predictor.removesuffix(RAW)


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

        def thresholds(predictor: str) -> tuple[Policy, ...]:
            return tuple(Policy("h", h, predictor, maximum=most) for most in self.maxima for h in self.hs)

        def cost(predictor: str) -> tuple[Policy, ...]:
            return tuple(Policy("cost", predictor=predictor, maximum=most) for most in self.maxima)

        deepest = max(self.maxima)
        found = [
            PolicyFamily(FIXED, "fixed", tuple(Policy("k", k) for k in self.ks)),
            PolicyFamily(EACH, "free", tuple(Policy("t", t, maximum=most) for most in self.maxima for t in self.ts)),
            PolicyFamily(SELF_VERIFY, "free", tuple(Policy("entropy", maximum=most) for most in self.maxima)),
            *(
                PolicyFamily(f"{name}, cost rule", "looking" if repeats else "free", cost(name))
                for name, (_, repeats) in ONLINE.items()
            ),
            PolicyFamily(f"{FITTED}, threshold", "fitted", thresholds(FITTED)),
            PolicyFamily(f"{FITTED}, cost rule", "fitted", cost(FITTED)),
        ]
        for name, head in heads.items():
            if is_published_style(head):
                as_published = Policy("h", PUBLISHED_H, name + RAW, min(PUBLISHED_MIN, deepest), deepest)
                found.append(PolicyFamily(name + AS_PUBLISHED, "head", (as_published,)))
            if head.config.w_rej != head.config.w_acc:
                found.append(PolicyFamily(f"{name}: raw, threshold", "head", thresholds(name + RAW)))
            found.append(PolicyFamily(f"{name}: calibrated, threshold", "head", thresholds(name)))
            found.append(PolicyFamily(f"{name}: calibrated, cost rule", "head", cost(name)))
        if knows_p:
            found.append(PolicyFamily(f"{KNOWN}, cost rule", "ceiling", cost(KNOWN)))
        return [*found, PolicyFamily(ORACLE, "oracle", (Policy("oracle"),))]


def is_published_style(head: AcceptanceHead) -> bool:
    """Reads what SpecDec++'s head reads, and was trained with a weight that its threshold is for."""
    return head.config.as_published and head.config.w_rej != head.config.w_acc
