"""Predictors that learn acceptance while decoding, from few numbers of the draft, without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

from draftsmith.modules.acceptance.repeats import RepeatIndex
from draftsmith.modules.decoding.stop import DraftView, LearnedState, Learner, Predictor, sigmoid

# Beyond these log-odds a softmax in float32 has no precision left.
MAX_LOGIT = 12.0
# Stands for 0, which has no logarithm.
SMALLEST = 1e-38


def log_odds(prob: float) -> float:
    """Return log(q / (1 - q)) of a probability q, within [-MAX_LOGIT, MAX_LOGIT]; NaN stays."""
    log_prob = math.log(SMALLEST if prob < SMALLEST else prob)
    if log_prob >= 0:
        return MAX_LOGIT
    logit = log_prob - math.log(-math.expm1(log_prob))
    # Comparisons take less time than `min` and `max`, for every drafted token.
    return MAX_LOGIT if logit > MAX_LOGIT else -MAX_LOGIT if logit < -MAX_LOGIT else logit


class OnlineLogistic(Learner):
    """P(a drafted token is accepted) = sigmoid(w . z) of features x [F], z = (x, 1); x[0] is the log-odds of q(y) or of
    another probability.

    It starts at w = (1, 0, .., 0), which predicts x[0]. A label moves the weights by one step of an online Newton
    method: A += p (1 - p) z z^T, w += A^-1 z (y - p), with p from before the step. A starts as the identity: an
    undecided token at x = 1 weighs 1/4. Over many labels the weights approach the fit to all of them, without a
    learning rate.
    """

    def __init__(self, num_features: int = 1):
        size = num_features + 1
        self.weights = [1.0] + [0.0] * num_features
        # The inverse of A.
        self._inverse = [[float(i == j) for j in range(size)] for i in range(size)]

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
        # 1 + p (1 - p) z^T A^-1 z.
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

    def state_dict(self) -> LearnedState:
        return {"weights": list(self.weights), "inverse": [list(row) for row in self._inverse]}

    def load_state_dict(self, state: LearnedState) -> None:
        self.weights, self._inverse = list(state["weights"]), [list(row) for row in state["inverse"]]


class OnlinePredictor(Predictor):
    """Predictor from the draft's confidence and from repetitions of the text, by a logistic that learns from
    verdicts."""

    late, learns = False, True

    def __init__(self) -> None:
        self._repeats = RepeatIndex()
        self.model = OnlineLogistic(2)
        self.learners = (self.model,)
        self._seen: list[tuple[float, ...]] = []

    def reset(self) -> None:
        self._repeats.reset()

    def start_round(self) -> None:
        self._seen = []

    def prob(self, view: DraftView) -> float:
        features = (log_odds(view.prob), self._repeats.score(view))
        self._seen.append(features)
        return self.model.prob(features)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        # Tokens behind the first rejected one were never verified.
        self.model.observe(self._seen, num_accepted)
