"""Stop policies for chains: a predictor of acceptance and a rule.

None of them can bias the output: what has been drafted stays in the draft (`protocols.StopPolicy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import MAX_LOGIT, log_odds, log_q_of
from draftsmith.modules.decoding.learner import Learner
from draftsmith.modules.decoding.protocols import DraftView, StopPolicy


class Predictor(Protocol):
    """Predictor of P(a drafted token is accepted | its prefix was), token by token.

    late: it predicts the token before the one shown, whose state the drafter has only now.
    learns: it must be shown every drafted token, even if the draft ends anyway.
    """

    late: bool
    learns: bool
    learners: Sequence[Learner] = ()

    def reset(self) -> None:
        """Start a new prompt; what was learned is kept."""
        return None

    def start_round(self) -> None:
        """Start a new draft."""
        return None

    def prob(self, view: DraftView) -> float:
        """Return the probability in [0, 1]; 1 if there is no token to predict yet."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn the verdict on the round's draft."""
        return None


class PredictionRule(Protocol):
    """Rule that ends a draft by its predicted probabilities."""

    learners: Sequence[Learner] = ()

    def enough(self, survival: float, unseen: int) -> bool:
        """Return True if one more token is not worth drafting, or if survival is NaN.

        survival: probability that all predicted tokens of the draft are accepted. unseen: tokens behind them.
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

    def state_dict(self) -> dict[str, Any]:
        return {"above": self._above, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._above, self._below = state["above"], state["below"]


class CostRule(PredictionRule):
    """Rule that stops once one more token is worth less than its time. It has no threshold to choose.

    Time is counted in target calls: a round of n drafted tokens takes 1 + c n. One more token adds survival x
    acceptance tokens on average, for c of time, in which the pace so far would have brought c x pace tokens. Stopping
    when the first is less than the second maximises tokens per time in the long run if `pace` is that maximum (a ratio
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
    """Stop policy of a predictor and a rule, whose learned state lasts from prompt to prompt.

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


class TrainedPredictor(Predictor, Protocol):
    """Predictor by a trained head, which `OnlinePredictor` can build on."""

    def logit(self, view: DraftView) -> float:
        """Return the log-odds of `prob`; infinite if there is no token to predict yet."""


class OnlinePredictor(Predictor):
    """Predictor from the draft's confidence and from repetitions of the text, by a logistic that learns from verdicts.

    With a trained head, the head's log-odds are the first feature: it starts at the head's prediction, and learns how
    far to trust it on this text.
    """

    learns = True
    # `prior` and `memory` with a head. With a prior of 1 the first verdicts move its predictions too far, whether right
    # or wrong; and in another text the trust has to be learned again.
    TRUST, MEMORY = 10.0, 500.0

    def __init__(self, head: TrainedPredictor | None = None):
        self.late, self._head = head is not None and head.late, head
        self._repeats = RepeatScores()
        more = {} if head is None else {"prior": self.TRUST, "memory": self.MEMORY}
        self.model = OnlineLogistic((head is not None) + 2, **more)
        self.learners = (self.model,)
        self._seen: list[tuple[float, ...]] = []
        # Of a late head: features of the token that it predicts next.
        self._before: tuple[float, ...] = ()

    def reset(self) -> None:
        if self._head is not None:
            self._head.reset()
        self._repeats.reset()

    def start_round(self) -> None:
        self._seen = []
        if self._head is not None:
            self._head.start_round()

    def prob(self, view: DraftView) -> float:
        features = self.features(view)
        if self._head is not None:
            head_logit = self._head.logit(view)
            if self.late:
                # The head's prediction and these features must be of the same token.
                features, self._before = self._before, features
                if view.num_drafted == 1:
                    return 1.0
            features = (min(max(head_logit, -MAX_LOGIT), MAX_LOGIT), *features)
        self._seen.append(features)
        return self.model.prob(features)

    def features(self, view: DraftView) -> tuple[float, ...]:
        """Return the features of the token shown, without the head."""
        return log_odds(log_q_of(view)), self._repeats.score(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        # Tokens behind the first rejected one were never verified.
        self.model.observe(self._seen, num_accepted)
