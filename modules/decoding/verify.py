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
    `_accept_block`. Sampling, a tree drawn without replacement: `_descend_drawn`.

    Raises:
        NonFinite: the target's numbers at a node that the walk visits, of a drawn chain at any node that the target may
            emit; the position is the node's depth.
    """
    ahead = logits.is_cuda if ahead is None else ahead
    numbers = _AheadNumbers(tree, logits, sampler) if ahead else _LazyNumbers(logits, sampler)
    if sampler.greedy or (tree.draft_prob is None and tree.drawn is None):
        return _walk(tree, numbers)
    if tree.draft_prob is not None:
        path, distribution = _accept_block(tree.tokens, tree.draft_prob, numbers)
    else:
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


def _accept_block(
    tokens: Sequence[int], draft_prob: Tensor | Sequence[Tensor], numbers: _LazyNumbers
) -> tuple[tuple[int, ...], Tensor]:
    """Accept the first tokens of a drawn chain by block verification (Sun et al. 2024, algorithm 2).

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)) for tokens x_1 .. x_N. The lengths N, N - 1, .. 1 are tried in
    turn, and the first that is accepted counts: N with probability w_N, i < N with S / (S + 1 - w_i), where S is the
    sum of (w_i p - q)+ over all next tokens. Behind i < N the target's own token is drawn from norm((w_i p - q)+),
    behind N from p.

    Given x_1 .. x_i, so i tokens or more are accepted with probability w_i: more than i with the sum of q w_{i+1} =
    min(w_i p, q), which is w_i - S, and i in its own turn with S. The next token has the weight min(w_i p, q) +
    (w_i p - q)+ = w_i p, so it follows the target. Any rule may end the chain that sees only what was drafted so far.
    Token by token (Leviathan et al. 2023) the probability is the product of all min(1, p / q), never more than w_i.

    Returns the accepted nodes, and the distribution of the target's own token behind them.
    """
    weights = [1.0]
    for node, token in enumerate(tokens):
        odds = numbers.odds(node, token, draft_prob[node])
        if odds != odds:  # checked first, because min(1, NaN) is 1
            raise NonFinite("probabilities", position=node)
        if not odds:  # nothing from here on is ever accepted
            break
        weights.append(min(1.0, weights[-1] * odds))

    count = len(weights) - 1
    while count:
        chance = weights[count]
        if count < len(tokens) and chance < 1:
            excess = numbers.excess(count, chance, draft_prob[count])
            chance = excess / (excess + 1 - chance)
        if numbers.source.accept(chance):
            break
        count -= 1
    own = numbers.distribution(count)
    return tuple(range(count)), own if count == len(tokens) else residual(weights[count] * own, draft_prob[count])


def _descend_drawn(tree: DraftTree, numbers: _LazyNumbers) -> tuple[tuple[int, ...], Tensor]:
    """Descend a drawn tree; return the accepted path, and the distribution of the target's own token behind it.

    The children of a node are drawn without replacement, and verified by recursive rejection (SpecInfer, Miao et al.
    2024; Sequoia, Chen et al. 2024): child y_i, drawn from q_i, is accepted with min(1, p_i(y_i) / q_i(y_i)). If it is
    rejected, p_{i+1} = norm((p_i - q_i)+), and q_{i+1} is q_i without y_i, renormalized. So the token that is emitted
    at a node has the distribution p_1 of the target for any number of children.
    """
    assert tree.drawn is not None
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    while True:
        parent = path[-1] if path else -1
        target_prob, draft_prob, rejected = numbers.distribution(parent + 1), tree.drawn.get(parent), NO_TOKEN  # [V]
        for child in children.get(parent, ()):
            assert draft_prob is not None
            if rejected != NO_TOKEN:
                draft_prob = without(draft_prob, rejected)
            token = tree.tokens[child]
            ratio = target_prob[token].item() / draft_prob[token].item()
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
        self._rows = dict[int, Tensor]()
        self.what = "logits" if sampler.greedy else "probabilities"

    def choice(self, node: int) -> int:
        """Return the target's choice behind a node, its argmax or a draw; NO_TOKEN if there is none."""
        if self._params.greedy:
            return best_token(self._logits[node])
        return self.source.draw(self.distribution(node))

    def distribution(self, node: int) -> Tensor:
        """Return the distribution [V] behind a node."""
        if node not in self._rows:
            self._rows[node] = probabilities(self._logits[node], self._params)
        return self._rows[node]

    def odds(self, node: int, token: int, draft_prob: Tensor) -> float:
        """Return p / q of a chain's token, drawn behind a node from draft_prob [V]."""
        return self.distribution(node)[token].item() / draft_prob[token].item()

    def excess(self, node: int, weight: float, draft_prob: Tensor) -> float:
        """Return the sum of (weight p - q)+ behind a node, q being draft_prob [V]."""
        return (weight * self.distribution(node) - draft_prob).clamp_min(0).sum().item()


class _AheadNumbers(_LazyNumbers):
    """The same numbers, computed beforehand."""

    def __init__(self, tree: DraftTree, logits: Tensor, sampler: Sampler):
        super().__init__(logits, sampler)
        self._choices = list[int]()
        if sampler.greedy:
            self._choices = best_tokens(logits).tolist()
            return
        self._distributions = probabilities(logits, self._params)  # [N + 1, V]
        if tree.draft_prob is not None:
            self._odds, self._excess = self._of_chain(tree.tokens, tree.draft_prob)
        elif tree.drawn is None and isinstance(self.source, TorchSource):
            self._choices = self._draws(tree, self.source)

    def _of_chain(
        self, tokens: Sequence[int], draft_prob: Tensor | Sequence[Tensor]
    ) -> tuple[list[float], list[float]]:
        """Return p / q of K drafted tokens, and the sums of (w p - q)+ behind the first 1 .. K - 1 of them."""
        drafted = to_device(torch.tensor(tokens), self._distributions.device)[:, None]  # [K, 1]
        p, q = self._distributions[: len(tokens)], torch.stack([*draft_prob])  # [K, V]
        odds = (p.gather(-1, drafted).double() / q.gather(-1, drafted).double())[:, 0]
        # w_i = min(1, w_{i-1} odds_i) without a loop: the logarithm is cut off where it is largest so far, above 0.
        total = odds.log().cumsum(0)
        weights = (total - total.cummax(0).values.clamp_min(0)).exp()
        excess = (weights[:-1, None].to(p) * p[1:] - q[1:]).clamp_min(0).sum(-1)  # [K - 1]
        both = torch.cat([odds, excess.double()]).tolist()
        return both[: len(tokens)], both[len(tokens) :]

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

    def odds(self, node: int, token: int, draft_prob: Tensor) -> float:
        return self._odds[node]

    def excess(self, node: int, weight: float, draft_prob: Tensor) -> float:
        return self._excess[node - 1]
