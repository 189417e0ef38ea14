"""Learning while decoding: an acceptance probability from one feature of the draft, without any training before."""

from __future__ import annotations

from collections.abc import Iterable

from draftsmith.modules.decoding.confidence import sigmoid


class OnlineLogistic:
    """P(a drafted token is accepted) = sigmoid(scale x + bias), for x = logit(max q) or another feature.

    Starts at scale 1 and bias 0, which takes logit(max q) at its word. A label moves the weights w = (scale, bias) by
    one step of an online Newton method: A += p (1 - p) z z^T, w += A^-1 z (y - p), with z = (x, 1) and p from before
    the step. A begins as `prior` times the identity; over many labels the weights approach the fit of all of them at
    once, and no learning rate is to be chosen.
    """

    def __init__(self, prior: float = 1.0):
        """prior: how strongly the start is believed; an undecided token at x = 1 weighs 1/4."""
        assert prior > 0
        self.scale, self.bias = 1.0, 0.0
        self._xx, self._x1, self._11 = prior, 0.0, prior

    def prob(self, x: float) -> float:
        """The probability for feature x."""
        return sigmoid(self.scale * x + self.bias)

    def update(self, x: float, accepted: float) -> None:
        """Learn one label in [0, 1]."""
        prob = self.prob(x)
        curvature, error = prob * (1 - prob), accepted - prob
        self._xx += curvature * x * x
        self._x1 += curvature * x
        self._11 += curvature
        determinant = self._xx * self._11 - self._x1**2
        self.scale += error * (self._11 * x - self._x1) / determinant
        self.bias += error * (self._xx - self._x1 * x) / determinant

    def observe(self, features: Iterable[float], num_accepted: int) -> None:
        """Learn a round's verdict: the first `num_accepted` drafted tokens were accepted, the next one, if there is
        one, was not; what lies behind it was never judged."""
        for number, x in enumerate(features):
            if number > num_accepted:
                return
            self.update(x, float(number < num_accepted))
