"""What a predictor and a rule would have done, read off rollouts: the decoder's own policies, round by round, with
predictors that read what was recorded. What they learn goes on from answer to answer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from draftsmith.eval.replay.replay import accepted_of, first_rounds, walk_rounds
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.modules.acceptance.policies import (
    ConfidenceName,
    OnlinePredictor,
    PredictionRule,
    Predictor,
    PredictorStop,
)
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.decoding.trace import DecodeTrace


class RecordedPredictor(Predictor, Protocol):
    """A predictor of recorded rounds. row: the number of the round that is being played."""

    row: int


class KnownPredictor:
    """Says what was recorded, or worked out from it."""

    learns = False

    def __init__(self, probs: Floats, late: bool):
        """probs [S, K]: of every drafted token, whatever predictor says it. late: a token's is known one token
        later."""
        self._probs: list[list[float]] = probs.tolist()
        self.late, self.row = late, 0

    def reset(self) -> None:
        """Nothing is remembered of a prompt."""

    def start_round(self) -> None:
        """Nothing is remembered."""

    def prob(self, view: DraftView) -> float:
        place = view.num_drafted - 1 - self.late
        return 1.0 if place < 0 else self._probs[self.row][place]

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned."""


class RecordedOnline(OnlinePredictor):
    """`OnlinePredictor` on recorded confidences."""

    def __init__(self, rollouts: ChainRollouts, confidence: ConfidenceName = "q", repeats: bool = True):
        super().__init__(confidence, repeats)
        self._features: list[list[list[float]]] = online_features(rollouts, confidence, repeats).tolist()
        self.row = 0

    def prob(self, view: DraftView) -> float:
        self._seen.append(tuple(self._features[self.row][view.num_drafted - 1]))
        return self.model.prob(self._seen[-1])


def online_features(rollouts: ChainRollouts, confidence: ConfidenceName, repeats: bool) -> Floats:
    """[S, K, F]: what `OnlinePredictor` learns from."""
    log_prob = rollouts.log_q if confidence == "q" else rollouts.log_max_q
    features = [log_odds_of(torch.from_numpy(log_prob)).numpy()]
    if repeats:
        assert rollouts.repeat is not None, "looked for when chains are recorded"
        features.append(rollouts.repeat)
    return np.stack(features, -1)


def replay_by_prediction(
    rollouts: ChainRollouts, predictor: RecordedPredictor, rule: PredictionRule, min_drafted: int, max_drafted: int
) -> list[DecodeTrace]:
    """One trace an answer, of `PredictorStop` with this predictor and this rule: what decoding answer after answer
    would have drafted. Like the decoder's own, a policy does not hear of an answer's last round."""
    assert 1 <= min_drafted <= max_drafted <= rollouts.depth
    stop = PredictorStop(predictor, rule, min_drafted, max_drafted)
    nothing = torch.empty(0, 0)
    views = [DraftView(n + 1, -1, nothing, nothing, None) for n in range(max_drafted)]
    available, accepted = np.minimum(rollouts.available(), max_drafted).tolist(), accepted_of(rollouts).tolist()
    traces = []
    for answer, first in first_rounds(rollouts):
        last = (0, 0)  # drafted and accepted in the round before, which the policy has yet to hear of

        def play(row: int, most: int) -> tuple[int, int, int]:
            nonlocal last
            stop.observe(*last)
            predictor.row, drafted = row, 0
            limit = min(available[row], most)
            if limit:
                stop.start_round()
                while drafted < limit:
                    drafted += 1
                    if stop.should_stop(views[drafted - 1]):
                        break
            last = drafted, min(drafted, accepted[row])
            return *last, drafted

        stop.reset()
        traces.append(walk_rounds(answer, first, play))
    return traces
