"""What any setting would have done, read off rollouts: rounds walk the text from t to t + accepted + 1.

Counts are those of `generate` with that setting, one by one: its limits near the end of the answer and of the contexts
hold here too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from draftsmith.eval.replay.rollouts import ChainRollouts, Floats, Ints, TargetAnswer, TreeRollouts
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.tree_rule import TreeRule
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


def threshold(rollouts: ChainRollouts, probs: Floats, h: float, limits: tuple[int, int], late: bool) -> Ints:
    """[S]: the rule of SpecDec++ (section 3.2): the first length n of the least or more at which 1 - (product of the
    probs of the tokens predicted so far) > h, else the most.

    probs [S, K]: acceptance probabilities of the drafted tokens, by whatever predictor. limits: fewest and most tokens.
    late: when the n-th token is drafted those before it are predicted, and it is not (a head of state `after`); else it
    is predicted too.
    """
    survival = np.cumprod(probs, axis=1)
    if late:
        survival = np.concatenate([np.ones((len(probs), 1)), survival[:, :-1]], axis=1)
    return first_true(rollouts, 1 - survival > h, *limits)


def confidence_lengths(rollouts: ChainRollouts, t: float, minimum: int, maximum: int) -> Ints:
    """[S]: the first length of `minimum` or more whose last token's probability is below t, else `maximum`."""
    return first_true(rollouts, np.exp(rollouts.log_q) < t, minimum, maximum)


def first_true(rollouts: ChainRollouts, stop: np.ndarray, minimum: int, maximum: int) -> Ints:
    """[S]: the first length n from `minimum` on with stop[:, n - 1], [S, K]; else `maximum`."""
    assert 1 <= minimum <= maximum <= rollouts.depth
    may = stop[:, minimum - 1 : maximum].copy()
    may[:, -1] = True
    return may.argmax(1) + minimum


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


def replay_tree(rollouts: TreeRollouts, nodes: int, depth: int, rule: TreeRule | None = None) -> list[DecodeTrace]:
    """One trace an answer, of `DynamicTree(nodes, depth, topk)`. rule: ends the draft where it chooses, takes as
    many of the nodes as it chooses, and learns on from answer to answer."""
    assert 1 <= depth <= rollouts.depth and nodes >= 1
    most_levels = np.full(len(rollouts.start), depth + 1) if rollouts.levels is None else rollouts.levels

    def size(row: int, levels: int) -> tuple[int, int]:
        """Nodes and levels of a tree that may have so many levels."""
        if rule is None:
            return min(nodes, num_candidates(rollouts.topk, levels)), levels
        assert rollouts.values is not None and rollouts.frontier is not None
        ends = (n for n in range(1, levels) if not rule.deeper(rollouts.frontier[row, n - 1].tolist))
        levels = next(ends, levels)
        most = min(nodes, num_candidates(rollouts.topk, levels))
        assert rollouts.values.shape[2] >= most
        return rule.choose(rollouts.values[row, levels - 1, :most].tolist()), levels

    def play(row: int, most: int) -> tuple[int, int, int]:
        levels = min(depth + 1, int(most_levels[row]), most)
        if levels < 1:
            return 0, 0, 0
        taken, levels = size(row, levels)
        rank = rollouts.rank[row, levels - 1]
        outside = np.flatnonzero((rank < 0) | (rank >= taken))
        accepted = int(outside[0]) if len(outside) else len(rank)
        text = rollouts.answers[rollouts.answer[row]].tokens
        if rule is not None and rollouts.start[row] + accepted + 1 < len(text):  # drafters never hear of the last round
            rule.observe(taken, levels, accepted)
        return taken, accepted, levels

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
