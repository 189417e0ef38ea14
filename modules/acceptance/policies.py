"""When to stop a chain, by the probabilities that its tokens will be accepted: what predicts them, and what is made of
them. Any drafter's chains, any predictor, one rule or the other.

None of it can bias the output: what has been drafted stays in the draft (`protocols.StopPolicy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import MAX_LOGIT, log_max_q_of, log_odds, log_q_of
from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.protocols import DraftView, StopPolicy

ConfidenceName = Literal["q", "max_q"]


class Predictor(Protocol):
    """Predicts P(a drafted token is accepted | its prefix was), token by token.

    late: it speaks of the token before the one it is shown, whose state the drafter only now has.
    learns: it has to be shown every drafted token, also where the draft ends anyway.
    """

    late: bool
    learns: bool
    learners: Sequence[Learner] = ()

    def reset(self) -> None:
        """A new prompt begins; what was learned lasts."""
        return None

    def start_round(self) -> None:
        """A new draft begins."""
        return None

    def prob(self, view: DraftView) -> float:
        """Probability in [0, 1]; 1 where there is no token to predict for yet."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """The verdict on the round's draft."""
        return None


class PredictionRule(Protocol):
    """What to make of the probabilities."""

    learners: Sequence[Learner] = ()

    def enough(self, survival: float, unseen: int) -> bool:
        """True when one more drafted token is not worth drafting, also where nothing can be said (NaN).

        survival: probability that all tokens of the draft that were predicted are accepted. unseen: tokens behind
        them.
        """

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """The verdict on a round's draft."""
        return None


class ThresholdRule(PredictionRule):
    """Enough once P(some token so far is rejected) = 1 - survival exceeds h (SpecDec++, section 3.2)."""

    def __init__(self, h: float):
        self.h = h

    def enough(self, survival: float, unseen: int) -> bool:
        return not 1 - survival <= self.h


class RecentRatio(Learner):
    """A ratio of two sums over all rounds and requests so far, of which the last `MEMORY` or so count: what is decoded
    changes with time."""

    MEMORY = 500

    def __init__(self, above: float, below: float):
        """The sums before the first round, as if one had been."""
        self._above, self._below = above, below

    @property
    def value(self) -> float:
        return self._above / self._below

    def add(self, above: float, below: float) -> None:
        """What one more round adds to the sums. What is no number teaches nothing: it would never be forgotten."""
        if not (math.isfinite(above) and math.isfinite(below)):
            return
        kept = 1 - 1 / self.MEMORY
        self._above, self._below = kept * self._above + above, kept * self._below + below

    def state_dict(self) -> dict[str, Any]:
        return {"above": self._above, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._above, self._below = state["above"], state["below"]


class CostRule(PredictionRule):
    """Enough once one more token is worth less than its time.

    Time is counted in target calls: a round of n drafted tokens takes 1 + c n. One more token adds, where everything
    before it is accepted and it is too, one token: survival x acceptance of them on average, for c of time, which at
    the pace so far would have brought c x pace tokens. Stopping where the first is less than the second maximises
    tokens by time in the long run, when `pace` is that maximum (a ratio of expectations; Dinkelbach 1967), which the
    pace reached comes close to. So no threshold is to be chosen.
    """

    def __init__(self, c: float):
        """c: time of drafting one more token, and of verifying it, by the time of a round without a draft."""
        assert c > 0
        self.c = c
        # As if one round had been: a draft of one token, accepted half of the time.
        self._pace, self._acceptance = RecentRatio(1.5, 1 + c), RecentRatio(0.5, 1.0)
        self.learners = (self._pace, self._acceptance)

    @property
    def pace(self) -> float:
        """Tokens by time, so far."""
        return self._pace.value

    @property
    def acceptance(self) -> float:
        """Accepted tokens by tokens that were verified, so far: those behind the first rejected one are not."""
        return self._acceptance.value

    def enough(self, survival: float, unseen: int) -> bool:
        acceptance = self.acceptance
        return not survival * acceptance ** (1 + unseen) >= self.c * self.pace

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self._pace.add(num_accepted + 1, 1 + self.c * num_drafted)
        self._acceptance.add(num_accepted, min(num_accepted + 1, num_drafted))


class PredictorStop(StopPolicy):
    """A stop policy of a predictor and a rule. What they have learned lasts from prompt to prompt.

    probs: what the predictor said in this round, one number for each time that it was asked.
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


class TrainedPredictor(Predictor, Protocol):
    """A predictor of which another one asks more.

    repeats: what it looks for repetitions with, if it does: every token is looked up once, whoever asks.
    """

    repeats: RepeatScores | None

    def logit(self, view: DraftView) -> float:
        """Log-odds of `prob`; infinite where there is no token to predict for yet."""


class OnlinePredictor(Predictor):
    """Predicts from the draft's own confidence and from repetitions of the text, by a logistic fit to the verdicts so
    far: no training before.

    With a trained head the head's log-odds are the first of its features: it begins as the head says, and learns from
    the verdicts how far to trust it on this text.
    """

    learns = True
    # `prior` and `memory` with a head: with a prior of 1 the first verdicts move its numbers too far, be it right or
    # wrong; and where another text begins, how far to trust it has to be learned anew.
    TRUST, MEMORY = 10.0, 500.0

    def __init__(self, confidence: ConfidenceName = "q", repeats: bool = True, head: TrainedPredictor | None = None):
        """confidence: of the token, or of the draft's most probable one. repeats: see `repeats.Repeats.score`."""
        self.late, self._head = head is not None and head.late, head
        self._best = confidence == "max_q"
        self._repeats = ((head and head.repeats) or RepeatScores()) if repeats else None
        more = {} if head is None else {"prior": self.TRUST, "memory": self.MEMORY}
        self.model = OnlineLogistic((head is not None) + 1 + repeats, **more)
        self.learners = (self.model,)
        self._seen: list[tuple[float, ...]] = []
        self._before: tuple[float, ...] = ()  # of a late head: numbers of the token that it speaks of next

    def reset(self) -> None:
        for part in (self._head, self._repeats):
            if part is not None:
                part.reset()

    def start_round(self) -> None:
        self._seen = []
        if self._head is not None:
            self._head.start_round()

    def prob(self, view: DraftView) -> float:
        known = self.known(view)
        if self._head is not None:
            said = self._head.logit(view)
            if self.late:
                known, self._before = self._before, known
                if view.num_drafted == 1:
                    return 1.0
            known = (min(max(said, -MAX_LOGIT), MAX_LOGIT), *known)
        self._seen.append(known)
        return self.model.prob(known)

    def known(self, view: DraftView) -> tuple[float, ...]:
        """What the draft alone says of the token shown."""
        logit = log_odds(self.log_prob(view))
        return (logit,) if self._repeats is None else (logit, self._repeats.score(view))

    def log_prob(self, view: DraftView) -> float:
        """The logarithm of the probability whose log-odds are looked at."""
        return log_max_q_of(view) if self._best else log_q_of(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Tokens behind the first rejected one were never verified: nothing is learned of them."""
        self.model.observe(self._seen, num_accepted)
