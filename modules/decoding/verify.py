"""Verify drafted tokens: one walk from the root for chains and trees, greedy and sampling.

On a CPU logits are read lazily: a softmax over the vocabulary is computed only at nodes that the walk visits. On a GPU
all are computed ahead, so that their numbers come in one transfer. Random numbers are consumed in the same order either
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import (
    Sampler,
    TorchSource,
    best_token,
    best_tokens,
    draw_rows,
    probabilities,
    residual,
    without,
)
from draftsmith.modules.transfer import to_device


@dataclass(frozen=True)
class Verdict:
    """Decision of the target: indices of the accepted nodes from the root down, then its own token."""

    path: tuple[int, ...]
    next_token: int


def verify(tree: DraftTree, logits: Tensor, sampler: Sampler, ahead: bool | None = None) -> Verdict:
    """Accept a path of a tree such that the emitted tokens follow the target exactly.

    logits: [N + 1, V] of the target: row 0 scores the root's children, row i + 1 what follows node i.
    ahead: compute beforehand all numbers that any walk may need; None: on CUDA only.

    Greedy: walk while the target's argmax is a child. Sampling, nodes chosen deterministically: draw x ~ p and go to
    child x if there is one (the distribution of accepting with p(x) and renormalizing). Sampling, a chain drawn from q:
    accept with min(1, p/q), else draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1). Sampling, a tree drawn
    without replacement: the same for one child after the other. (`_descend_drawn` does both.)

    Raises:
        NonFinite: the target's numbers at a node that the walk visits; the position is the node's depth.
    """
    ahead = logits.is_cuda if ahead is None else ahead
    numbers = _AheadNumbers(tree, logits, sampler) if ahead else _LazyNumbers(logits, sampler)
    if sampler.greedy or (tree.draft_prob is None and tree.drawn is None):
        return _walk(tree, numbers)
    path, distribution = _descend_drawn(tree, numbers)
    token = sampler.source.draw(distribution)
    if token == NO_TOKEN:
        raise NonFinite("probabilities", position=len(path))
    return Verdict(path, token)


def _walk(tree: DraftTree, numbers: _LazyNumbers) -> Verdict:
    """Descend the tree as long as the target's choice is a child."""
    # (parent, token) -> node, the first of equal siblings.
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    node = -1
    while True:
        token = numbers.choice(node + 1)
        if token == NO_TOKEN:
            raise NonFinite(numbers.what, position=len(path))
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def _descend_drawn(tree: DraftTree, numbers: _LazyNumbers) -> tuple[tuple[int, ...], Tensor]:
    """Descend drawn nodes; return the accepted path, and the distribution of the target's own token behind it.

    A node of a chain has one child, accepted with min(1, p/q), else the next token is drawn from norm((p - q)+). The
    children of a tree's node are drawn without replacement, and verified by recursive rejection (SpecInfer, Miao et al.
    2024; Sequoia, Chen et al. 2024): child y_i, drawn from q_i, is accepted with min(1, p_i(y_i) / q_i(y_i)). If it is
    rejected, p_{i+1} = norm((p_i - q_i)+), and q_{i+1} is q_i without y_i, renormalized. So the token that is emitted
    at a node has the distribution p_1 of the target for any number of children.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    while True:
        parent = path[-1] if path else -1
        target_prob, draft_prob, rejected = numbers.distribution(parent + 1), tree.drawn_from(parent), NO_TOKEN  # [V]
        for child in children.get(parent, ()):
            assert draft_prob is not None
            if rejected != NO_TOKEN:
                draft_prob = without(draft_prob, rejected)
            token = tree.tokens[child]
            ratio = numbers.odds(child, token, target_prob, draft_prob)
            # Checked first, because min(1, NaN) is 1.
            if ratio != ratio:
                raise NonFinite("probabilities", position=len(path))
            if numbers.source.accept(min(1.0, ratio)):
                path.append(child)
                break
            target_prob, rejected = residual(target_prob, draft_prob), token
        else:
            # All children are rejected, or there are none.
            return tuple(path), target_prob


class _LazyNumbers:
    """Numbers of the target, computed when a walk needs them. Node 0 is the root, node i + 1 the tree's node i."""

    def __init__(self, logits: Tensor, sampler: Sampler):
        self._logits, self._params, self.source = logits, sampler.params, sampler.source
        self.what = "logits" if sampler.greedy else "probabilities"

    def choice(self, node: int) -> int:
        """Return the target's choice behind a node, its argmax or a draw; NO_TOKEN if there is none."""
        if self._params.greedy:
            return best_token(self._logits[node])
        return self.source.draw(self.distribution(node))

    def distribution(self, node: int) -> Tensor:
        """Return the distribution [V] behind a node."""
        return probabilities(self._logits[node], self._params)

    def odds(self, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        """Return p / q of a drafted node's token, by these distributions [V]."""
        return target_prob[token].item() / draft_prob[token].item()


class _AheadNumbers(_LazyNumbers):
    """The same numbers, computed beforehand."""

    def __init__(self, tree: DraftTree, logits: Tensor, sampler: Sampler):
        super().__init__(logits, sampler)
        self._choices, self._odds = list[int](), list[float]()
        if sampler.greedy:
            self._choices = best_tokens(logits).tolist()
            return
        self._distributions = probabilities(logits, self._params)  # [N + 1, V]
        if tree.draft_prob is not None:
            self._odds = self._chain_odds(tree.tokens, tree.draft_prob)
        elif tree.drawn is None and isinstance(self.source, TorchSource):
            self._choices = self._draws(tree, self.source)

    def _chain_odds(self, tokens: Sequence[int], draft_prob: Tensor | Sequence[Tensor]) -> list[float]:
        """Return p / q of K drafted tokens."""
        drafted = to_device(torch.tensor(tokens), self._distributions.device)[:, None]  # [K, 1]
        q = draft_prob if isinstance(draft_prob, Tensor) else torch.stack(list(draft_prob))  # [K, V]
        p = self._distributions[: len(tokens)].gather(-1, drafted)
        return (p.double() / q.gather(-1, drafted).double())[:, 0].tolist()

    def _draws(self, tree: DraftTree, source: TorchSource) -> list[int]:
        """Return what the source would draw at every node if the walk got there, N + 1 tokens.

        A walk draws once at each depth, so nodes of one depth share a uniform.
        """
        depths = [0]
        for parent in tree.parents:
            depths.append(depths[parent + 1] + 1)
        coming = source.peek(max(depths) + 1)
        uniforms = torch.tensor([coming[depth] for depth in depths], dtype=torch.float64)
        return draw_rows(self._distributions, to_device(uniforms, self._distributions.device)).tolist()

    def choice(self, node: int) -> int:
        if not self._choices:
            return super().choice(node)
        if isinstance(self.source, TorchSource) and not self._params.greedy:
            # Consume what `_draws` has peeked at.
            self.source.uniform()
        return self._choices[node]

    def distribution(self, node: int) -> Tensor:
        return self._distributions[node]

    def odds(self, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        return self._odds[node] if self._odds else super().odds(node, token, target_prob, draft_prob)
