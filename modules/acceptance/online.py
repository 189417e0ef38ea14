"""Predictors that learn acceptance while decoding, from few numbers of the draft, without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any

from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.acceptance.repeats import RepeatIndex
from draftsmith.modules.decoding.confidence import MAX_LOGIT, confidence_of, log_odds, sigmoid
from draftsmith.modules.decoding.stop import DraftView, Learner, Predictor


class OnlineLogistic(Learner):
    """P(a drafted token is accepted) = sigmoid(w . z) of features x [F], z = (x, 1); x[0] is the log-odds of q(y) or of
    another probability.

    It starts at w = (1, 0, .., 0), which predicts x[0]. A label moves the weights by one step of an online Newton
    method: A += p (1 - p) z z^T, w += A^-1 z (y - p), with p from before the step. A starts as `prior` times the
    identity. Over many labels the weights approach the fit to all of them, without a learning rate.

    With a `memory` the text may change: along the z of each label one part in `memory` of the information is forgotten
    (Kulhavy 1987), unless there is little, so that one label moves the logit by 1 or more.
    """

    def __init__(self, num_features: int = 1, prior: float = 1.0, memory: float = math.inf):
        """prior: weight of the start; an undecided token at x = 1 weighs 1/4. memory: labels remembered."""
        assert prior > 0 and num_features >= 1
        size = num_features + 1
        self._memory = memory
        self.weights = [1.0] + [0.0] * num_features
        # The inverse of A.
        self._inverse = [[(i == j) / prior for j in range(size)] for i in range(size)]

    def prob(self, x: Sequence[float]) -> float:
        """Return the probability for features x [F]."""
        return sigmoid(sum(map(mul, self.weights, x)) + self.weights[-1])

    def update(self, x: Sequence[float], accepted: float) -> None:
        """Learn one label in [0, 1]."""
        # A NaN would stay in the weights for ever.
        if not all(map(math.isfinite, x)):
            return
        prob, z = self.prob(x), (*x, 1.0)
        # A^-1 after a rank-one update (Sherman and Morrison 1950); it also gives A^-1 z of the step.
        along = [sum(a * b for a, b in zip(row, z, strict=True)) for row in self._inverse]
        spread = sum(a * b for a, b in zip(along, z, strict=True))
        curvature = prob * (1 - prob)
        # With much information along z, forget one part in `memory` of it.
        if spread < 1:
            curvature -= 1 / (self._memory * spread)
        # 1 + p (1 - p) z^T A^-1 z, less what is forgotten.
        shrink = 1 + curvature * spread
        for i, row in enumerate(self._inverse):
            for j in range(len(row)):
                row[j] -= curvature * along[i] * along[j] / shrink
        # A^-1 after the update times z is A^-1 z / shrink.
        step = (accepted - prob) / shrink
        self.weights = [weight + a * step for weight, a in zip(self.weights, along, strict=True)]

    def observe(self, features: Iterable[Sequence[float]], num_accepted: int) -> None:
        """Learn a round's verdict: the first `num_accepted` drafted tokens were accepted, the next was rejected, those
        behind it were never verified."""
        for number, x in enumerate(features):
            if number > num_accepted:
                return
            self.update(x, float(number < num_accepted))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": list(self.weights), "inverse": [list(row) for row in self._inverse]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self._inverse = list(state["weights"]), [list(row) for row in state["inverse"]]


class OnlinePredictor(Predictor):
    """Predictor from the draft's confidence and from repetitions of the text, by a logistic that learns from verdicts.

    With a trained head, the head's log-odds are the first feature: it starts at the head's prediction, and learns how
    far to trust it on this text.
    """

    learns = True
    # `prior` and `memory` with a head. With a prior of 1 the first verdicts move its predictions too far, whether right
    # or wrong; and in another text the trust has to be learned again.
    TRUST, MEMORY = 10.0, 500.0

    def __init__(self, head: HeadPredictor | None = None):
        self.late, self._head = head is not None and head.late, head
        self._repeats = RepeatIndex()
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
        return log_odds(confidence_of(view, "token").log_q), self._repeats.score(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        # Tokens behind the first rejected one were never verified.
        self.model.observe(self._seen, num_accepted)
