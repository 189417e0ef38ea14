"""SpecDec++'s sweep: every fixed K against every threshold of every head, replayed from rollouts (figure 4), and the
bound that theorem 3.1 sets to thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.eval.replay import replay
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import ThresholdRule
from draftsmith.modules.decoding.trace import DecodeTrace, Totals

# SpecDec++ section 4: the head and the threshold that its headline numbers are of.
PUBLISHED_W_REJ, PUBLISHED_DEPTH, PUBLISHED_H = 6.0, 3, 0.7


@dataclass(frozen=True)
class LengthRule:
    """How long a draft gets.

    k: that many tokens, where it is above 0. head, h: SpecDec++'s threshold on the product of this head's outputs,
    calibrated or as they are. t: until a token whose own q is below it, the baseline that needs no head. known, h: the
    threshold on true probabilities min(1, p/q), which only the target knows. None of them: the greedy oracle of lemma
    2.1, which drafts what will be accepted.
    """

    k: int = 0
    head: str | None = None
    h: float = 0.0
    calibrated: bool = False
    t: float = 0.0
    known: bool = False

    @property
    def label(self) -> str:
        """The setting, short."""
        if self.k:
            return f"K={self.k}"
        if self.t:
            return f"t={self.t:g}"
        if self.known:
            return f"h={self.h:g}, true p/q"
        if self.head is None:
            return "oracle"
        return f"h={self.h:g}" + (", calibrated" if self.calibrated else "")

    @property
    def can_run(self) -> bool:
        """A decoder can do it: neither the oracle's rule nor one that knows p."""
        return not self.known and self != LengthRule()

    def method(self, minimum: int, maximum: int) -> str:
        """Name of the method in `eval bench`; the head is passed beside it."""
        assert self.can_run
        if self.k:
            return f"spec:k={self.k}"
        if self.t:
            return f"confidence:t={self.t:g}:min=1:max={maximum}"
        calibrated = ":calibrated=on" if self.calibrated else ""
        return f"specdec++:h={self.h:g}:min={minimum}:max={maximum}{calibrated}"


@dataclass(frozen=True)
class Setting:
    """A rule and what it came to on some prompts."""

    rule: LengthRule
    totals: Totals


def rules(ks: Iterable[int], thresholds: Sequence[float], heads: Iterable[str]) -> Iterator[LengthRule]:
    """Fixed K first, then thresholds on q, then each head's thresholds, raw and calibrated, then the oracle."""
    yield from (LengthRule(k=k) for k in ks)
    yield from (LengthRule(t=t) for t in thresholds)
    for head in heads:
        for calibrated in (False, True):
            yield from (LengthRule(head=head, h=h, calibrated=calibrated) for h in thresholds)
    yield LengthRule()


def replayed(
    rollouts: ChainRollouts, rule: LengthRule, limits: tuple[int, int], heads: Mapping[str, AcceptanceHead]
) -> list[DecodeTrace]:
    """One trace an answer: the counts that decoding with this rule would have had, exactly. limits: fewest and most
    drafted tokens under a head's threshold."""
    if rule.k:
        return replay.replay(rollouts, replay.fixed_k(rollouts, rule.k))
    if rule.t:
        return replay.replay(rollouts, replay.confidence_lengths(rollouts, rule.t, 1, limits[1]))
    if rule.known:
        predictor, minimum = replay.KnownPredictor(true_probs(rollouts), late=False), 1
    elif rule.head is None:
        return replay.replay(rollouts, replay.oracle(rollouts))
    else:
        head = heads[rule.head]
        probs = replay.head_probs(rollouts.heads[rule.head], head, rule.calibrated)
        predictor, minimum = replay.KnownPredictor(probs, head.config.late), limits[0]
    return replay.replay_by_prediction(rollouts, predictor, ThresholdRule(rule.h), minimum, limits[1])


def true_probs(rollouts: ChainRollouts) -> Floats:
    """[S, K]: min(1, p/q) of every drafted token; greedy 1 or 0, and 0 below the first rejection, where nobody asks."""
    if rollouts.accept_along is not None:
        return rollouts.accept_along
    return np.nan_to_num(rollouts.accept_prob)


def published_head(heads: Mapping[str, AcceptanceHead]) -> str | None:
    """The head of the paper's inputs, w_rej and depth, where it is among these; not one with tied blocks first."""
    alike = {name: head for name, head in heads.items() if head.config.as_published}
    for name, head in sorted(alike.items(), key=lambda item: item[1].config.tied):
        if (head.config.w_rej / head.config.w_acc, head.config.num_blocks) == (PUBLISHED_W_REJ, PUBLISHED_DEPTH):
            return name
    return None


def front(settings: Sequence[Setting]) -> list[Setting]:
    """Settings on the Pareto front of discard rate and verification rate, by rising discard rate."""
    points = [(setting.totals.discard_rate, setting.totals.verification_rate) for setting in settings]
    return [settings[i] for i in pareto_front(points)]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the points (x, y), less of each being better, that no other point beats in one without being worse in
    the other; by rising x. Of equal points the first."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not front or points[number][1] < points[front[-1]][1]:
            front.append(number)
    return front


def rejection_bound(t_draft: float, t_target: float, delta: float = 0.0) -> float:
    """Stopping is best once P(some drafted token is rejected) reaches (c2 + delta) / (c1 + c2 + delta): no threshold h
    above it can be. It may be best before.

    Times are those of the cost model (eq. 2.1). c1 = t_draft is what one more token costs in vain where one before it
    is rejected; c2 = t_target - t_draft what it saves at most where none is: a target call, less its own step. That
    holds while the rest of the answer is decoded as well as can be, since a plain call always brings one token; delta
    is then 0, and the bound 1 - t_draft / t_target. Where another policy decodes it, delta is how much more than c2
    for every token a draft of it may save by going on.
    """
    c1, c2 = t_draft, t_target - t_draft
    return (c2 + delta) / (c1 + c2 + delta)
