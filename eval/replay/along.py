"""What the target thinks of drafts below their first rejection: one call reads the branches of many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftsmith.eval.replay.coupling import ReadAnswer, num_equal
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams

MAX_NODES = 300  # drafted tokens of one call: more of them look at more that is not theirs


@dataclass
class _Tree:
    """The answer's text, and drafts that leave it. wanted: tokens whose probability is asked for, as (round, place in
    the draft, node that it follows, token)."""

    tokens: list[int]
    parents: list[int]
    wanted: list[tuple[int, int, int, int]] = field(default_factory=list)


def accept_along(
    target: CausalLM, prompt: Sequence[int], reading: ReadAnswer, params: SamplingParams, recorded: ChainRollouts
) -> Floats:
    """[S, K]: min(1, p(y)/q(y)) of every drafted token of one answer's rounds, p after the drafted tokens before it.

    Where `recorded.accept_prob` has it, it is that. NaN beyond a draft's end, and beyond the target's context.
    """
    found = recorded.accept_prob.copy()
    text = reading.text.tokens
    limit = target.info.max_position - len(prompt)
    session = target.session(1, len(prompt) + len(text) + MAX_NODES + recorded.depth, static=False)
    session.extend([prompt])
    tree = _of_text(text)
    for row, start in enumerate(recorded.start.tolist()):
        drafted = [token for token in recorded.token[row].tolist() if token >= 0][: max(limit - start, 0)]
        _grow(tree, row, start, drafted, text, found)
        if len(tree.tokens) - len(text) > MAX_NODES - recorded.depth:
            _verify(session, len(prompt), tree, params, recorded.log_q, found)
            tree = _of_text(text)
    _verify(session, len(prompt), tree, params, recorded.log_q, found)
    return found


def _of_text(text: Sequence[int]) -> _Tree:
    return _Tree(list(text), list(range(-1, len(text) - 1)))


def _grow(tree: _Tree, row: int, start: int, drafted: Sequence[int], text: Sequence[int], known: Floats) -> None:
    """Add a round's draft: along the text while they agree, then as a branch of its own."""
    agreed = num_equal(drafted, text[start:])
    node = start - 1  # which the draft's first token follows
    for place, token in enumerate(drafted):
        if np.isnan(known[row, place]):
            tree.wanted.append((row, place, node, token))
        if place < agreed:
            node += 1
        elif place + 1 < len(drafted):
            tree.tokens.append(token)
            tree.parents.append(node)
            node = len(tree.tokens) - 1


def _verify(session: Session, kept: int, tree: _Tree, params: SamplingParams, log_q: Floats, found: Floats) -> None:
    """One call; fills `found`.

    Raises:
        NonFinite: the target's logits.
    """
    if not tree.wanted:
        return
    logits = session.extend([tree.tokens], [tree.parents], num_logits=len(tree.tokens)).logits[0]
    session.keep([kept])
    rows, places, nodes, tokens = (list(column) for column in zip(*tree.wanted, strict=True))
    needed, inverse = np.unique(nodes, return_inverse=True)
    distributions = probabilities(logits[torch.from_numpy(needed).to(logits.device)], params)
    own = distributions[
        torch.from_numpy(inverse).to(distributions.device), torch.tensor(tokens, device=distributions.device)
    ]
    prob = own.double().cpu().numpy()
    if np.isnan(prob).any():
        raise NonFinite(model="target", position=kept + 1 + nodes[int(np.isnan(prob).argmax())])
    found[rows, places] = np.minimum(prob / np.exp(log_q[rows, places]), 1.0)
