"""Which drafted tokens the target keeps: one walk from the root for chains and trees, greedy and sampling.

Rows are looked at lazily: a softmax over the vocabulary is taken only at nodes that the walk visits.
"""

from __future__ import annotations

from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftTree, Source, Verdict
from draftsmith.modules.sampling import best_token, probabilities, residual
from draftsmith.modules.types import SamplingParams


def verify(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    """Accept a path of the tree such that what is emitted follows the target exactly.

    logits: [N+1, V] of the target for the N nodes it read; row 0 scores the root's children, row i+1 what follows
        node i.

    Greedy: walk while the target's argmax is a child. Sampling, nodes chosen deterministically: draw x ~ p and go to
    child x where there is one (the law of accepting with p(x) and renormalising). Sampling, a chain drawn from q:
    accept with min(1, p/q), else draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1).
    """
    if logits.shape[0] != tree.num_read + 1:
        raise ValueError(f"logits: got {logits.shape[0]} rows, expected {tree.num_read + 1}, one a node and the root's")
    if params.greedy:
        return _walk_greedy(tree, logits)
    if tree.draft_prob is None:
        return _walk_drawn(tree, logits, params, source)
    return _walk_chain(tree, logits, params, source)


def _children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """(parent, token) -> node; of equal siblings the first."""
    found: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        found.setdefault((parent, token), node)
    return found


def _walk_greedy(tree: DraftTree, logits: Tensor) -> Verdict:
    # A GPU's choices come in one transfer; on a CPU only those are made that the walk asks for.
    all_choices = logits.argmax(-1).tolist() if logits.is_cuda else None

    def choice(row: int) -> int:
        return best_token(logits[row]) if all_choices is None else all_choices[row]

    children = _children(tree)
    path: list[int] = []
    node = -1
    while node < tree.num_read:
        token = choice(node + 1)
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
    return Verdict(tuple(path), None)


def _walk_drawn(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    children = _children(tree)
    path: list[int] = []
    node = -1
    while node < tree.num_read:
        token = source.draw(probabilities(logits[node + 1], params))
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
    return Verdict(tuple(path), None)


def _walk_chain(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    assert tree.draft_prob is not None
    for i, token in enumerate(tree.tokens):
        target_prob, draft_prob = probabilities(logits[i], params), tree.draft_prob[i]
        p, q = target_prob[token].item(), draft_prob[token].item()
        if not source.accept(min(1.0, p / q)):
            return Verdict(tuple(range(i)), source.draw(residual(target_prob, draft_prob)))
    own = None if tree.last_unread else source.draw(probabilities(logits[-1], params))
    return Verdict(tuple(range(len(tree.tokens))), own)
