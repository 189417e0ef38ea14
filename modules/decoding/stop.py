"""Stop rules: policies that end a drafted chain, their view of it, and their state that is learned while decoding.

No rule can bias the output: the token that a policy is shown stays in the draft, whatever its value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import entropies, wide

# -- what is learned while decoding

LearnedState = dict[str, Any]  # JSON values


class Learner(ABC):
    """Part of a drafter, a policy or a rule that learns from the verdicts of the target.

    Its state is all that is kept from one answer to the next. Whoever holds a `Learner` lists it in its `learners`, so
    that a bench can keep the state apart for every temperature, restore it before repeated work, and save it with an
    interrupted run.
    """

    @abstractmethod
    def state_dict(self) -> LearnedState:
        """Return a copy of what was learned, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: LearnedState) -> None:
        """Replace what was learned by a `state_dict`."""


def learners_of(owner: object) -> Sequence[Learner]:
    """Return the learners of a drafter, a policy or a rule; drafters of users may have no such attribute."""
    return getattr(owner, "learners", ())


def learned_state(owner: object) -> list[LearnedState]:
    """Return what a drafter, a policy or a rule has learned, as JSON values; empty where it does not learn."""
    return [learner.state_dict() for learner in learners_of(owner)]


def load_learned_state(owner: object, states: Sequence[LearnedState]) -> None:
    """Replace what was learned by the `learned_state` of this owner, or of another one that was built alike."""
    for learner, state in zip(learners_of(owner), states, strict=True):
        learner.load_state_dict(state)


def snapshot_learned_state(owner: object) -> Callable[[], None]:
    """Return a function that restores what is learned now."""
    states = learned_state(owner)
    return lambda: load_learned_state(owner, states)


class RecentRatio(Learner):
    """Ratio of two sums over all rounds and requests, with exponential forgetting over about MEMORY rounds."""

    MEMORY = 500

    def __init__(self, above: float, below: float):
        """Set the sums before the first round."""
        self._above, self._below = above, below

    @property
    def value(self) -> float:
        return self._above / self._below

    def add(self, above: float, below: float) -> None:
        """Add a round to the sums."""
        # A NaN would stay in the sums for ever.
        if not (math.isfinite(above) and math.isfinite(below)):
            return
        # Older rounds fade by one part in MEMORY a round.
        kept = 1 - 1 / self.MEMORY
        self._above, self._below = kept * self._above + above, kept * self._below + below

    def state_dict(self) -> LearnedState:
        return {"above": self._above, "below": self._below}

    def load_state_dict(self, state: LearnedState) -> None:
        self._above, self._below = state["above"], state["below"]


# -- what a policy sees


# Not frozen: that would make it ten times slower, and one is made for every drafted token.
@dataclass(slots=True)
class DraftView:
    """State of a draft right after its n-th token, as a stop policy sees it.

    The forward that gave `logits` read the token BEFORE the n-th. So `hidden` predicts `token`, and for n >= 2 it is
    also the drafter's state once it has read drafted token n - 1.
    """

    num_drafted: int
    token: int
    states: Tensor  # [1, H] the drafter's hidden state after its final norm
    logits: Tensor  # [V] raw draft logits, before temperature
    draft_prob: Tensor | None  # [V] the distribution `token` was drawn from; None when greedy
    context: Sequence[int] = ()  # all tokens before this round's draft
    _softmax: Tensor | None = None
    _prob: float | None = None

    @property
    def hidden(self) -> Tensor:
        """State [H]. Sliced on demand: most policies never read it."""
        return self.states[0]

    @property
    def distribution(self) -> Tensor:
        """Distribution [V] of the token; of a greedy draft the softmax at temperature 1, computed once."""
        if self.draft_prob is not None:
            return self.draft_prob
        if self._softmax is None:
            self._softmax = wide(self.logits).softmax(-1)
        return self._softmax

    @property
    def prob(self) -> float:
        """Probability of the token in its distribution, read from the device once."""
        if self._prob is None:
            distribution = self.distribution
            on_cpu = distribution.is_cpu
            self._prob = distribution.numpy().item(self.token) if on_cpu else distribution[self.token].item()
        return self._prob

    @property
    def entropy(self) -> float:
        """Entropy of the distribution in nats."""
        return entropies(self.distribution).item()


# -- policies


class RoundObserver(Protocol):
    """Part of a drafter that is shown every round."""

    learners: Sequence[Learner] = ()

    def reset(self) -> None:
        """Begin a new prompt; what was learned is kept."""
        return None

    def start_round(self) -> None:
        """Begin a new draft."""
        return None

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in the verdict on the round's draft."""
        return None


class StopPolicy(RoundObserver, Protocol):
    """Decides when a chain is long enough.

    The token that a policy is shown stays in the draft: dropping it because of its value would bias the output.
    """

    max_drafted: int

    def should_stop(self, view: DraftView) -> bool:
        """Return whether `view.token` is to be the draft's last."""


class FixedLengthStop(StopPolicy):
    """Draft K tokens a round (Leviathan et al. 2023)."""

    def __init__(self, k: int):
        self.max_drafted = k

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self.max_drafted


class ConfidenceStop(StopPolicy):
    """Stop once the drafted token's own probability falls below `threshold` (assisted generation of transformers).

    The token that falls below stays in the draft. Greedy drafts are judged by the softmax at temperature 1.
    """

    def __init__(self, threshold: float, min_drafted: int, max_drafted: int):
        self.threshold, self.min_drafted, self.max_drafted = threshold, min_drafted, max_drafted

    def should_stop(self, view: DraftView) -> bool:
        if view.num_drafted >= self.max_drafted:
            return True
        # "Not at least", so that NaN stops.
        return view.num_drafted >= self.min_drafted and not view.prob >= self.threshold


class RunningEntropy:
    """Mean entropy of the distributions whose token was rejected, over one sequence (HSDDW).

    It is 0 before the first rejection.
    """

    def __init__(self) -> None:
        # Of this round's drafted tokens.
        self.entropies: list[float] = []
        self.reset()

    def reset(self) -> None:
        self._sum, self._count = 0.0, 0

    @property
    def threshold(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def start_round(self) -> None:
        self.entropies = []

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if num_accepted < num_drafted:
            self._sum += self.entropies[num_accepted]
            self._count += 1


class SelfVerifyStop(RunningEntropy, StopPolicy):
    """Stop once the entropy of a token's distribution exceeds the mean at rejected tokens (HSDDW,
    self-verification)."""

    def __init__(self, max_drafted: int):
        super().__init__()
        self.max_drafted = max_drafted

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(view.entropy)
        return view.num_drafted >= self.max_drafted or not self.entropies[-1] <= self.threshold


# -- by predicted acceptance


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)). Neither branch's exponential can overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


class Predictor(RoundObserver, Protocol):
    """Predictor of P(a drafted token is accepted | its prefix was), token by token.

    late: it predicts one token behind, because it reads the drafter's state AFTER that token.
    learns: it must be shown every drafted token, even if the draft ends anyway.
    """

    late: bool
    learns: bool

    def prob(self, view: DraftView) -> float:
        """Return the probability in [0, 1]; 1 if there is no token to predict yet."""


class PredictionRule(Protocol):
    """Rule that ends a draft by its predicted probabilities."""

    learners: Sequence[Learner] = ()

    def enough(self, survival: float, unseen: int) -> bool:
        """Return True if one more token is not worth drafting, or if survival is NaN.

        survival: probability that all predicted tokens of the draft are accepted. unseen: drafted tokens without a
        prediction yet, 1 for a late predictor.
        """

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn the verdict on a round's draft."""
        return None


class ThresholdRule(PredictionRule):
    """Rule that stops once P(some token so far is rejected) = 1 - survival exceeds h (SpecDec++, section 3.2)."""

    def __init__(self, h: float):
        self.h = h

    def enough(self, survival: float, unseen: int) -> bool:
        # Negated, so that NaN stops.
        return not 1 - survival <= self.h


class CostRule(PredictionRule):
    """Rule that stops once one more token is worth less than its time. It has no threshold to choose.

    Time is counted in target calls: a round of n drafted tokens takes 1 + c n. One more token adds survival x
    acceptance tokens on average, for c of time, in which the pace so far would have brought c x pace tokens. Stopping
    when the first is less than the second maximizes tokens per time in the long run if `pace` is that maximum (a ratio
    of expectations; Dinkelbach 1967), which the pace reached comes close to.
    """

    def __init__(self, c: float):
        """c: time of drafting and verifying one more token, over the time of a round without a draft."""
        assert c > 0
        self.c = c
        # Start as after one round: a draft of one token, accepted half of the time.
        self._pace, self._acceptance = RecentRatio(1.5, 1 + c), RecentRatio(0.5, 1.0)
        self.learners = (self._pace, self._acceptance)

    @property
    def pace(self) -> float:
        """Tokens per time so far."""
        return self._pace.value

    @property
    def acceptance(self) -> float:
        """Accepted over verified tokens so far; those behind the first rejected one are not verified."""
        return self._acceptance.value

    def enough(self, survival: float, unseen: int) -> bool:
        acceptance = self.acceptance
        # Negated, so that NaN stops.
        return not survival * acceptance ** (1 + unseen) >= self.c * self.pace

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self._pace.add(num_accepted + 1, 1 + self.c * num_drafted)
        self._acceptance.add(num_accepted, min(num_accepted + 1, num_drafted))


class PredictorStop(StopPolicy):
    """Stop by a predictor and a rule, whose learned state lasts from prompt to prompt.

    SpecDec++ is an acceptance head with `ThresholdRule`.

    probs: predictions of this round, one per call.
    """

    def __init__(self, predictor: Predictor, rule: PredictionRule, min_drafted: int, max_drafted: int):
        assert 1 <= min_drafted <= max_drafted
        self.predictor, self.rule = predictor, rule
        self.min_drafted, self.max_drafted = min_drafted, max_drafted
        self.learners = (*predictor.learners, *rule.learners)
        self.probs: list[float] = []
        self._survival = 1.0

    def reset(self) -> None:
        self.predictor.reset()

    def start_round(self) -> None:
        self._survival, self.probs = 1.0, []
        self.predictor.start_round()

    def should_stop(self, view: DraftView) -> bool:
        predictor = self.predictor
        # A predictor that learns has to see the last token too.
        full = view.num_drafted >= self.max_drafted
        if full and not predictor.learns:
            return True
        prob = predictor.prob(view)
        self.probs.append(prob)
        self._survival *= prob
        return full or (view.num_drafted >= self.min_drafted and self.rule.enough(self._survival, int(predictor.late)))

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self.predictor.observe(num_drafted, num_accepted)
            self.rule.observe(num_drafted, num_accepted)


class SlotConfidenceStop(StopPolicy):
    """Stop before the first token whose confidence, by a block drafter's confidence head, is below `threshold`.

    The head does not see that token, which is never drawn, so that nothing is biased. llama.cpp cuts where a token's
    own probability falls below `--spec-draft-p-min` (src/models/dflash.cpp).

    confidence_logits: of this round's slots, set by the drafter. confidence: of a slot behind a token. probs: this
    round's confidences, of the first token on.
    """

    def __init__(self, threshold: float, max_drafted: int):
        self.threshold, self.max_drafted = threshold, max_drafted
        self.confidence_logits: Sequence[float] = ()
        self.confidence: Callable[[float, int], float] = lambda logit, previous: 1.0
        self.probs: list[float] = []

    def drafts_first(self, root: int) -> bool:
        """Begin a new draft behind the root, and return whether its first token is worth drafting."""
        self.probs = []
        return self._continues(0, root)

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self.max_drafted or not self._continues(view.num_drafted, view.token)

    def _continues(self, slot: int, previous: int) -> bool:
        if slot >= len(self.confidence_logits):
            return False
        prob = self.confidence(self.confidence_logits[slot], previous)
        if math.isnan(prob):
            raise NonFinite("confidences")
        self.probs.append(prob)
        return 1 - prob <= 1 - self.threshold
