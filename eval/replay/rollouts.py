"""Rollouts: at every position of the target's own text the draft that begins there, and where the target leaves it.

The text X is the target's, answered once. A round that begins at position t drafts y_1, y_2, ...; coupled with X, the
target's verdicts are known without asking it again: drafted token d meets X_{t+d-1}. Greedy it is accepted where it is
that token. Sampling, X ~ p is given first and the draft drawn to fit: with x = X_{t+d-1}, accepted (and then y = x)
with probability min(1, q(x)/p(x)), else y ~ norm((q - p)+). Summed over X this is y ~ q accepted with min(1,
p(y)/q(y)), the target's own token after a rejection being X's (a maximal coupling of Leviathan et al. 2023, algorithm
1). One uniform number a position decides for every round that meets it. So what any stop rule does is read off the
rollouts: rounds of a replay walk X from t to t + accepted + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TargetAnswer:
    """The target's text on one prompt. room: the most tokens it could have had (`max_new_tokens`, or the context's
    end), which bounds the drafts near it."""

    id: str
    task: str
    prompt_tokens: int
    tokens: list[int]
    ended: bool
    room: int


@dataclass(frozen=True)
class ChainRollouts:
    """S rounds that begin everywhere in the answers, each drafted K tokens deep whatever the target says.

    answer [S]: number of the answer. start [S]: tokens of the answer before the round, 1 or more (the first token is
    the prefill's). For answer a the rounds are consecutive, start 1 .. len(tokens) - 1. token [S, K]: drafted, along X
    until the first rejection and then as the draft itself goes on. num_accepted [S]: of a draft of K tokens, at most
    what is left of X. log_q, log_max_q, entropy [S, K]: of the distribution that token was drawn from (greedy: the
    draft's softmax), log q of the token itself, nats. accept_prob, overlap [S, K]: min(1, p/q) of the token (greedy: 1
    or 0) and sum_v min(p, q) (greedy: the same), down to and with the first rejected token; NaN below it and beyond X's
    end. heads: label -> raw logits [S, K] of an acceptance head for each token; of one that reads the state after it,
    NaN where the drafter has not read the token.
    accept_along [S, K]: min(1, p/q) of every drafted token where the target reads the draft itself, so below the first
    rejection too: what a policy that knew p and q would look at. None: not asked for, or greedy.
    repeat [S, K]: how each token goes on with a repetition of prompt and answer (`acceptance.repeats.Repeats.score`).
    None: not looked for.
    past_end [S]: drafted tokens accepted after X's end token, where all before them were: what the target would have
    gone on with counts in a round's `num_accepted`, though it is never emitted. None: no answer was read on.
    Where the drafter's context ends, drafts are shorter: token is -1 there, and the floats are NaN.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    token: Ints
    num_accepted: Ints
    log_q: Floats
    log_max_q: Floats
    entropy: Floats
    accept_prob: Floats
    overlap: Floats
    heads: Mapping[str, Floats] = field(default_factory=dict)
    past_end: Ints | None = None
    accept_along: Floats | None = None
    repeat: Floats | None = None

    @property
    def depth(self) -> int:
        """K."""
        return self.token.shape[1]

    def verified(self) -> NDArray[np.bool_]:
        """[S, K]: drafted tokens down to and with the first that was rejected, within X: those with a label."""
        return ~np.isnan(self.accept_prob)

    def available(self) -> Ints:
        """[S]: tokens that the drafter could draft, K but for the end of its context."""
        return (self.token >= 0).sum(1)


@dataclass(frozen=True)
class TreeRollouts:
    """S rounds as of `ChainRollouts`, each with all the candidates of an EAGLE-2 tree of one `topk`.

    rank [S, D, D]: for trees of at most d+1 levels ([:, d]), the place that the candidate on X at level j+1 has among
    all candidates of these levels, by value, best first; -1 where no candidate is on X. A tree of m nodes holds
    exactly the candidates of rank < m, so it accepts as many levels as ranks below m follow each other. confidence,
    on_text [S, D]: of the head's first child of the node on X at level j: its own confidence (probability by the head
    that gives values), and whether X goes on with it; NaN where the walk has left the tree, or X is over.
    levels [S]: that the drafter's context allowed, D where None. place [S, D]: of the children of the node on X at
    level j the one on X, 0 for the most probable, -1 where it is not among the topk, or where `confidence` is NaN.
    values [S, D, M]: of trees of at most d+1 levels ([:, d]) the values of the best M candidates, best first, which are
    logarithms of probabilities; -inf where there are fewer. frontier [S, D, topk]: the same of the nodes of level j
    that are expanded, or would be next. None: not recorded.
    `rank` goes on past X's end token, with what the target would have gone on with, as a round's `num_accepted` does.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    topk: int
    rank: Ints
    confidence: Floats
    on_text: Floats
    levels: Ints | None = None
    place: Ints | None = None
    values: Floats | None = None
    frontier: Floats | None = None

    @property
    def depth(self) -> int:
        """`DynamicTree.depth`, times that nodes were expanded: one less than the D levels."""
        return self.rank.shape[1] - 1


Rollouts = TypeVar("Rollouts", ChainRollouts, TreeRollouts)


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Recordings by one drafter, of one depth and with the same heads, as one; their answers are counted on."""
    first = parts[0]
    arrays: dict[str, Any] = {}
    for item in fields(first):
        value = getattr(first, item.name)
        if isinstance(value, np.ndarray):
            arrays[item.name] = np.concatenate([getattr(part, item.name) for part in parts])
        elif isinstance(value, Mapping):
            arrays[item.name] = {k: np.concatenate([getattr(part, item.name)[k] for part in parts]) for k in value}
    before = np.cumsum([0, *(len(part.answers) for part in parts)])
    arrays["answer"] = np.concatenate([part.answer + n for part, n in zip(parts, before, strict=False)])
    return replace(first, answers=[answer for part in parts for answer in part.answers], **arrays)
