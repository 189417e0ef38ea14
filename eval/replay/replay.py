"""What any setting would have done, read off rollouts: rounds walk the text from t to t + accepted + 1.

Counts are those of `generate` with that setting, one by one: its limits near the end of the answer and of the contexts
hold here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from draftsmith.eval.replay.rollouts import ChainRollouts, Floats, Ints, TargetAnswer, TreeRollouts
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.policies import (
    ConfidenceName,
    OnlinePredictor,
    PredictionRule,
    Predictor,
    PredictorStop,
    TrainedPredictor,
)
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.decoding.stop import RunningEntropy
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import num_candidates

# A round by its row: (how many tokens it may draft) -> (drafted, accepted, the drafter's forwards).
PlayRound = Callable[[int, int], tuple[int, int, int]]


def fixed_k(rollouts: ChainRollouts, k: int) -> Ints:
    """[S]: k drafted tokens a round."""
    assert 1 <= k <= rollouts.depth
    return np.full(len(rollouts.start), k, np.int64)


def head_probs(logits: Floats, head: AcceptanceHead, calibrated: bool) -> Floats:
    """[S, K]: a head's raw outputs, as the paper's rule takes them, or its probabilities."""
    raw = torch.from_numpy(logits)
    return torch.sigmoid(head.calibrated(raw) if calibrated else raw).numpy()


def confidence_lengths(rollouts: ChainRollouts, t: float, minimum: int, maximum: int) -> Ints:
    """[S]: the first length of `minimum` or more whose last token's probability is below t, else `maximum`."""
    assert 1 <= minimum <= maximum <= rollouts.depth
    stop = np.exp(rollouts.log_q[:, minimum - 1 : maximum]) < t
    stop[:, -1] = True
    return stop.argmax(1) + minimum


def oracle(rollouts: ChainRollouts) -> Ints:
    """[S]: drafts end just before the token that will be rejected (SpecDec++, lemma 2.1), so that nothing is discarded
    and a round ends where the target disagrees: N_target = rejections + 1 (the prefill), and one more where the
    answer's last token was agreed upon, which the last round's target call gives. A first token that would be
    rejected is not drafted at all. Where K tokens are accepted the round ends, as it does in a draft of at most K.
    """
    lengths = np.array([len(answer.tokens) for answer in rollouts.answers], np.int64)[rollouts.answer]
    return np.minimum(rollouts.num_accepted, lengths - 1 - rollouts.start)


def replay(rollouts: ChainRollouts, lengths: Ints, calls_per_token: int = 1) -> list[DecodeTrace]:
    """One trace an answer. lengths [S]: tokens that the policy drafts in a round that begins there, 0 or more.
    calls_per_token: forwards of the drafter, 0 for a lookup."""
    available, accepted = np.minimum(rollouts.available(), lengths), accepted_of(rollouts)

    def play(row: int, most: int) -> tuple[int, int, int]:
        drafted = min(int(available[row]), most)
        return drafted, min(drafted, int(accepted[row])), drafted * calls_per_token

    return [walk_rounds(answer, first, play) for answer, first in first_rounds(rollouts)]


def self_verify(rollouts: ChainRollouts, k: int) -> list[DecodeTrace]:
    """One trace an answer, of HSDDW's self-verification: stop at the first token whose distribution has more entropy
    than the running mean at rejected tokens, which is 0 before the first rejection; at most k."""
    assert 1 <= k <= rollouts.depth
    available, accepted = np.minimum(rollouts.available(), k), accepted_of(rollouts)
    policy = RunningEntropy()

    def play(row: int, most: int) -> tuple[int, int, int]:
        entropies = rollouts.entropy[row, : min(int(available[row]), most)]
        above = np.flatnonzero(entropies > policy.threshold)
        drafted = int(above[0]) + 1 if len(above) else len(entropies)
        kept = min(drafted, int(accepted[row]))
        policy.entropies = entropies.tolist()
        policy.observe(drafted, kept)
        return drafted, kept, drafted

    traces = []
    for answer, first in first_rounds(rollouts):
        policy.reset()
        traces.append(walk_rounds(answer, first, play))
    return traces


class RecordedPredictor(Predictor, Protocol):
    """A predictor of recorded rounds. row: the number of the round that is being played."""

    row: int


class KnownPredictor(TrainedPredictor):
    """Says what was recorded, or worked out from it."""

    learns, repeats = False, None

    def __init__(self, probs: Floats, late: bool):
        """probs [S, K]: of every drafted token, whatever predictor says it. late: a token's is known one token
        later."""
        self._probs: list[list[float]] = probs.tolist()
        self.late, self.row = late, 0

    def prob(self, view: DraftView) -> float:
        place = view.num_drafted - 1 - self.late
        return 1.0 if place < 0 else self._probs[self.row][place]

    def logit(self, view: DraftView) -> float:
        prob = self.prob(view)
        return math.log(prob / (1 - prob)) if 0 < prob < 1 else (prob - 0.5) * math.inf


class RecordedOnline(OnlinePredictor):
    """`OnlinePredictor` on recorded confidences."""

    def __init__(
        self,
        rollouts: ChainRollouts,
        confidence: ConfidenceName = "q",
        repeats: bool = True,
        head: KnownPredictor | None = None,
    ):
        """head: with its probabilities."""
        super().__init__(confidence, repeats, head)
        self._features: list[list[list[float]]] = online_features(rollouts, confidence, repeats).tolist()
        self._recorded, self.row = head, 0

    def prob(self, view: DraftView) -> float:
        if self._recorded is not None:
            self._recorded.row = self.row
        return super().prob(view)

    def known(self, view: DraftView) -> tuple[float, ...]:
        return tuple(self._features[self.row][view.num_drafted - 1])


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


def replay_tree(rollouts: TreeRollouts, nodes: int, depth: int) -> list[DecodeTrace]:
    """One trace an answer, of `DynamicTree(nodes, depth, topk)`."""
    assert 1 <= depth <= rollouts.depth and nodes >= 1

    def play(row: int, most: int) -> tuple[int, int, int]:
        levels = min(depth + 1, int(rollouts.levels[row]), most)
        if levels < 1:
            return 0, 0, 0
        taken = min(nodes, num_candidates(rollouts.topk, levels))
        rank = rollouts.rank[row, levels - 1]
        outside = np.flatnonzero((rank < 0) | (rank >= taken))
        return taken, int(outside[0]) if len(outside) else len(rank), levels

    return [walk_rounds(answer, first, play) for answer, first in first_rounds(rollouts)]


def accepted_of(rollouts: ChainRollouts) -> Ints:
    """[S]: of a draft of K tokens, those after the answer's end token too."""
    return rollouts.num_accepted if rollouts.past_end is None else rollouts.num_accepted + rollouts.past_end


def first_rounds(rollouts: ChainRollouts | TreeRollouts) -> list[tuple[TargetAnswer, int]]:
    """Every answer with the row of the round that begins before its token 1."""
    counts = np.bincount(rollouts.answer, minlength=len(rollouts.answers))
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    return list(zip(rollouts.answers, first.tolist(), strict=True))


def walk_rounds(answer: TargetAnswer, first: int, play: PlayRound) -> DecodeTrace:
    """The rounds of one answer, as `generate` cuts them."""
    trace, emitted, length = DecodeTrace(prefill_emitted=1), 1, len(answer.tokens)
    while emitted < length:
        # No use in drafting past the last token wanted, whose value the round's own token gives.
        most = answer.room - emitted - 1
        drafted, accepted, calls = play(first + emitted - 1, most) if most > 0 else (0, 0, 0)
        count = min(accepted + 1, length - emitted)
        trace.steps.append(DecodeStep(drafted, accepted, count, calls))
        emitted += count
    return trace
