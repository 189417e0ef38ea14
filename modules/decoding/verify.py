"""Which drafted tokens the target keeps: one walk from the root for chains and trees, greedy and sampling.

Rows are looked at lazily: a softmax over the vocabulary is taken only at nodes that the walk visits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftTree, Source, Verdict
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import best_token, best_tokens, probabilities, residual
from draftsmith.modules.types import SamplingParams


def verify(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    """Accept a path of the tree such that what is emitted follows the target exactly.

    logits: [N+1, V] of the target for the N nodes it read; row 0 scores the root's children, row i+1 what follows
        node i.

    Greedy: walk while the target's argmax is a child. Sampling, nodes chosen deterministically: draw x ~ p and go to
    child x where there is one (the law of accepting with p(x) and renormalising). Sampling, a chain drawn from q:
    accept with min(1, p/q), else draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1).

    Raises:
        NonFinite: the target's numbers at a node that the walk visits; its position is the node's depth.
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
    all_choices = best_tokens(logits).tolist() if logits.is_cuda else None

    def choice(row: int) -> int:
        if all_choices is None:
            return best_token(logits[row])
        if all_choices[row] == NO_TOKEN:
            raise NonFinite
        return all_choices[row]

    return _walk(tree, choice)


def _walk_drawn(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    return _walk(tree, lambda row: source.draw(probabilities(logits[row], params)))


def _walk(tree: DraftTree, choice: Callable[[int], int]) -> Verdict:
    """Down the tree as long as the target's choice, by its row of logits, is a child."""
    children = _children(tree)
    path: list[int] = []
    node = -1
    while node < tree.num_read:
        try:
            token = choice(node + 1)
        except NonFinite as error:
            raise error.passed(offset=len(path)) from None
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
    return Verdict(tuple(path), None)


def _walk_chain(tree: DraftTree, logits: Tensor, params: SamplingParams, source: Source) -> Verdict:
    assert tree.draft_prob is not None
    accepted = 0
    try:
        for accepted, token in enumerate(tree.tokens):
            target_prob, draft_prob = probabilities(logits[accepted], params), tree.draft_prob[accepted]
            ratio = target_prob[token].item() / draft_prob[token].item()
            if ratio != ratio:  # and min(1, NaN) is 1
                raise NonFinite("probabilities")
            if not source.accept(min(1.0, ratio)):
                return Verdict(tuple(range(accepted)), source.draw(residual(target_prob, draft_prob)))
        accepted = len(tree.tokens)
        own = None if tree.last_unread else source.draw(probabilities(logits[-1], params))
    except NonFinite as error:
        raise error.passed(offset=accepted) from None
    return Verdict(tuple(range(accepted)), own)
