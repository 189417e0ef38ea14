"""Replay stop policies and tree sizes on recorded rollouts.

A replayed round that begins at position t of the text continues at t + accepted + 1. Counts equal those of `generate`
with the same policy, one by one, with its limits near the end of the response and of the contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from draftsmith.benchmarks.papers.rollouts import ChainRollouts, Floats, Ints, TargetAnswer, TreeRollouts
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.stop import (
    DraftView,
    PredictionRule,
    Predictor,
    PredictorStop,
    ThresholdRule,
)
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import num_candidates
from draftsmith.modules.drafters.methods import by_drafter, chain_method

# Row of a round and the most tokens it may draft -> drafted, accepted, forwards of the drafter.
PlayRound = Callable[[int, int], tuple[int, int, int]]
RuleName = Literal["k", "t", "h", "oracle"]
TRUE_PROBS = "true p/q"
RAW = ", raw"  # suffix of a head's name: its output without calibration


@dataclass(frozen=True)
class Policy:
    """One setting of a stop policy.

    Attributes:
        value: K, t or h of the rule.
        predictor: name of the probabilities that the rule h reads.
        minimum, maximum: shortest and longest draft.
    """

    rule: RuleName
    value: float = 0.0
    predictor: str = ""
    minimum: int = 1
    maximum: int = 0

    @property
    def label(self) -> str:
        """Short text of the setting for tables."""
        if self.rule == "k":
            return f"K={self.value:g}"
        value = f"{self.rule}={self.value:g}, " if self.rule in "th" else ""
        return f"{value}max {self.maximum}" if self.maximum else self.rule

    @property
    def head(self) -> str:
        """Name of the head whose probabilities it reads."""
        return self.predictor.removesuffix(RAW)

    def method(self, drafter: str) -> str | None:
        """Return the method of `eval bench` (a head is passed beside it), or None if no decoder can run it."""
        by = by_drafter(drafter)
        limits = f"min={self.minimum}:max={self.maximum}{by}"
        if self.rule == "k":
            return f"{chain_method(drafter)}:k={self.value:g}"
        if self.rule == "t":
            return f"confidence:t={self.value:g}:{limits}"
        if self.predictor in (TRUE_PROBS, ""):
            return None
        return f"specdec++:h={self.value:g}:{limits}{'' if self.predictor.endswith(RAW) else ':calibrated=on'}"


class PolicyReplay:
    """Replays policies on the rollouts of some prompts; each is replayed once."""

    def __init__(
        self,
        rollouts: ChainRollouts,
        heads: Mapping[str, AcceptanceHead],
        probs: Mapping[str, Floats] | None = None,
    ):
        """heads: those whose logits were recorded. probs: probabilities [S, K] of further predictors, by name."""
        self.rollouts = rollouts
        self.predictors = {name: KnownPredictor(values, late=False) for name, values in (probs or {}).items()}
        for name, head in heads.items():
            for suffix, calibrated in ((RAW, False), ("", True)):
                values = head_probs(rollouts.heads[name], head, calibrated)
                self.predictors[name + suffix] = KnownPredictor(values, late=True)
        self._replayed: dict[Policy, list[DecodeTrace]] = {}

    def traces(self, policy: Policy) -> list[DecodeTrace]:
        """Return one trace per response."""
        if policy not in self._replayed:
            self._replayed[policy] = self._replay(policy)
        return self._replayed[policy]

    def pairs(self, policy: Policy, c: float) -> Floats:
        """Return tokens and their time [prompts, 2], in target calls: 1 per round and c per drafted token."""
        counts = [
            (trace.num_tokens, trace.num_target_calls + c * trace.num_draft_tokens) for trace in self.traces(policy)
        ]
        return np.array(counts, float)

    def _replay(self, policy: Policy) -> list[DecodeTrace]:
        rollouts, limits = self.rollouts, (policy.minimum, policy.maximum)
        if policy.rule == "k":
            assert 1 <= policy.value <= rollouts.depth
            return replay(rollouts, np.full(len(rollouts.start), int(policy.value), np.int64))
        if policy.rule == "t":
            return replay(rollouts, confidence_lengths(rollouts, policy.value, *limits))
        if policy.rule == "oracle":
            return replay(rollouts, oracle(rollouts))
        predictor = self.predictors[policy.predictor]
        return replay_by_prediction(rollouts, predictor, ThresholdRule(policy.value), *limits)


def head_probs(logits: Floats, head: AcceptanceHead, calibrated: bool) -> Floats:
    """Return a head's probabilities [S, K]: calibrated, or its raw outputs as the paper's rule reads them."""
    raw = torch.from_numpy(logits)
    return torch.sigmoid(head.calibrated(raw) if calibrated else raw).numpy()


def confidence_lengths(rollouts: ChainRollouts, t: float, minimum: int, maximum: int) -> Ints:
    """Return the first length [S] of `minimum` or more whose last token has a probability below t, else `maximum`."""
    assert 1 <= minimum <= maximum <= rollouts.depth
    stop = np.exp(rollouts.log_q[:, minimum - 1 : maximum]) < t
    stop[:, -1] = True
    return stop.argmax(1) + minimum


def oracle(rollouts: ChainRollouts) -> Ints:
    """Return drafts [S] that end just before the token that will be rejected (SpecDec++, lemma 2.1).

    Nothing is discarded, and a round ends where the target disagrees, or after K accepted tokens. A first token that
    would be rejected is not drafted at all.
    """
    lengths = np.array([len(answer.tokens) for answer in rollouts.answers], np.int64)[rollouts.answer]
    return np.minimum(rollouts.num_accepted, lengths - 1 - rollouts.start)


def replay(rollouts: ChainRollouts, lengths: Ints) -> list[DecodeTrace]:
    """Return one trace per response. lengths [S]: tokens that the policy drafts in a round that begins there."""
    available = np.minimum(rollouts.available(), lengths)
    accepted = rollouts.num_accepted + rollouts.past_end

    def play(row: int, most: int) -> tuple[int, int, int]:
        drafted = min(int(available[row]), most)
        return drafted, min(drafted, int(accepted[row])), drafted

    return [walk_rounds(answer, first, play) for answer, first in first_rounds(rollouts)]


class KnownPredictor(Predictor):
    """Predictor with recorded probabilities."""

    learns = False

    def __init__(self, probs: Floats, late: bool):
        """probs [S, K]: of every drafted token. late: the probability of a token is known one token later."""
        self._probs: list[list[float]] = probs.tolist()
        self.late, self.row = late, 0

    def prob(self, view: DraftView) -> float:
        place = view.num_drafted - 1 - self.late
        return 1.0 if place < 0 else self._probs[self.row][place]


def replay_by_prediction(
    rollouts: ChainRollouts, predictor: KnownPredictor, rule: PredictionRule, min_drafted: int, max_drafted: int
) -> list[DecodeTrace]:
    """Replay `PredictorStop` with this predictor and rule, response after response.

    As in the decoder, the policy does not observe the last round of a response.
    """
    assert 1 <= min_drafted <= max_drafted <= rollouts.depth
    stop = PredictorStop(predictor, rule, min_drafted, max_drafted)
    nothing = torch.empty(0, 0)
    views = [DraftView(n + 1, -1, nothing, nothing, None) for n in range(max_drafted)]
    available = np.minimum(rollouts.available(), max_drafted).tolist()
    accepted = (rollouts.num_accepted + rollouts.past_end).tolist()
    traces: list[DecodeTrace] = []
    for answer, first in first_rounds(rollouts):
        last = (0, 0)  # drafted and accepted in the round before, which the policy has not observed yet

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
    """Replay `DynamicTree(nodes, depth, topk)`, one trace per response."""
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


def first_rounds(rollouts: ChainRollouts | TreeRollouts) -> Sequence[tuple[TargetAnswer, int]]:
    """Return every response with the row of the round that begins before its token 1."""
    counts = np.bincount(rollouts.answer, minlength=len(rollouts.answers))
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    return list(zip(rollouts.answers, first.tolist(), strict=True))


def walk_rounds(answer: TargetAnswer, first: int, play: PlayRound) -> DecodeTrace:
    """Return the rounds of one response, cut as `generate` cuts them."""
    trace, emitted, length = DecodeTrace(prefill_emitted=1), 1, len(answer.tokens)
    while emitted < length:
        # The round's own token is the last one: drafting it too would be useless.
        most = answer.room - emitted - 1
        drafted, accepted, calls = play(first + emitted - 1, most) if most > 0 else (0, 0, 0)
        count = min(accepted + 1, length - emitted)
        trace.steps.append(DecodeStep(drafted, accepted, count, calls))
        emitted += count
    return trace
