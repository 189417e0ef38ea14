"""Verify drafted tokens: one walk from the root for chains and trees, greedy and sampling, row by row.

On a CPU rows of logits are read lazily: a softmax over the vocabulary is computed only at nodes that the walk visits.
On a GPU all are computed ahead, so that every row's numbers come in one transfer or two. Random numbers are consumed in
the same order either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import (
    Sampler,
    TorchSource,
    best_token,
    best_tokens,
    draw_each,
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


def verify(
    trees: Sequence[DraftTree | None],
    logits: Tensor,
    sampler: Sampler,
    ahead: bool | None = None,
) -> list[Verdict | None]:
    """Accept a path of every tree such that the emitted tokens follow the target exactly; None for a row without one.

    logits: [B, n, V] of the target, n > N: row 0 scores the root's children, row i + 1 what follows node i.
    ahead: compute beforehand all numbers that any walk may need; None: on CUDA only.

    Greedy: walk while the target's argmax is a child. Sampling, nodes chosen deterministically: draw x ~ p and go to
    child x if there is one (the distribution of accepting with p(x) and renormalizing). Sampling, a chain drawn from q:
    accept with min(1, p/q), else draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1). Sampling, a tree drawn
    without replacement: the same for one child after the other (`_descend_drawn`).

    Raises:
        NonFinite: the target's numbers at a node that the walk visits; the position is the node's depth.
    """
    ahead = logits.is_cuda if ahead is None else ahead
    numbers = _AheadNumbers(trees, logits, sampler) if ahead else _LazyNumbers(logits, sampler)
    verdicts: list[Verdict | None] = [None] * len(trees)
    # (row, accepted nodes, distribution of the target's own token).
    corrections: list[tuple[int, tuple[int, ...], Tensor]] = []
    for row, tree in enumerate(trees):
        if tree is None:
            continue
        if sampler.greedy or (tree.draft_prob is None and tree.drawn is None):
            verdicts[row] = _walk(tree, numbers, row)
        elif tree.drawn is not None:
            corrections.append((row, *_descend_drawn(tree, numbers, row)))
        else:
            corrections.append((row, *_accept_drawn(tree, numbers, row)))
    if corrections:
        rows, paths, distributions = zip(*corrections, strict=True)
        drawn = draw_each(distributions, [sampler.sources[row] for row in rows])
        for row, path, token in zip(rows, paths, drawn, strict=True):
            if token == NO_TOKEN:
                raise NonFinite("probabilities", position=len(path), row=row)
            verdicts[row] = Verdict(path, token)
    return verdicts


def _walk(tree: DraftTree, numbers: _LazyNumbers, row: int) -> Verdict:
    """Descend the tree as long as the target's choice is a child."""
    # (parent, token) -> node, the first of equal siblings.
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    node = -1
    while True:
        token = numbers.choice(row, node + 1)
        if token == NO_TOKEN:
            raise NonFinite(numbers.what, position=len(path), row=row)
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def _accept_drawn(tree: DraftTree, numbers: _LazyNumbers, row: int) -> tuple[tuple[int, ...], Tensor]:
    """Return which tokens of a drawn chain are accepted, and the distribution of the target's own next token."""
    assert tree.draft_prob is not None
    for place, token in enumerate(tree.tokens):
        target_prob, draft_prob = numbers.distribution(row, place), tree.draft_prob[place]  # [V]
        ratio = numbers.odds(row, place, token, target_prob, draft_prob)
        # Checked first, because min(1, NaN) is 1.
        if ratio != ratio:
            raise NonFinite("probabilities", position=place, row=row)
        if not numbers.sources[row].accept(min(1.0, ratio)):
            return tuple(range(place)), residual(target_prob, draft_prob)
    return tuple(range(len(tree.tokens))), numbers.distribution(row, len(tree.tokens))


def _descend_drawn(tree: DraftTree, numbers: _LazyNumbers, row: int) -> tuple[tuple[int, ...], Tensor]:
    """Descend a tree that was drawn without replacement; return the path, and the target's own distribution behind it.

    Recursive rejection (SpecInfer, Miao et al. 2024; Sequoia, Chen et al. 2024): child y_i, drawn from q_i, is accepted
    with min(1, p_i(y_i) / q_i(y_i)). If it is rejected, p_{i+1} = norm((p_i - q_i)+), and q_{i+1} is q_i without y_i,
    renormalized. So the token that is emitted at a node has the distribution p_1 of the target for any number of
    children.
    """
    assert tree.drawn is not None
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    while True:
        parent = path[-1] if path else -1
        target_prob, draft_prob = numbers.distribution(row, parent + 1), tree.drawn.get(parent)  # [V]
        token = NO_TOKEN
        for child in children.get(parent, ()):
            assert draft_prob is not None
            if token != NO_TOKEN:
                target_prob = residual(target_prob, draft_prob)
                draft_prob = without(draft_prob, token)
            token = tree.tokens[child]
            chance = (target_prob[token] / draft_prob[token]).item()
            # Checked first, because min(1, NaN) is 1.
            if chance != chance:
                raise NonFinite("probabilities", position=len(path), row=row)
            if numbers.sources[row].accept(min(1.0, chance)):
                path.append(child)
                break
        else:
            # All children are rejected, or there are none.
            last = target_prob if token == NO_TOKEN or draft_prob is None else residual(target_prob, draft_prob)
            return tuple(path), last


class _LazyNumbers:
    """Numbers of the target, computed when a walk needs them. Node 0 is the root, node i + 1 the tree's node i."""

    def __init__(self, logits: Tensor, sampler: Sampler):
        self._logits, self._params, self.sources = logits.unbind(), sampler.params, sampler.sources
        self.what = "logits" if sampler.greedy else "probabilities"

    def choice(self, row: int, node: int) -> int:
        """Return the target's choice behind a node, its argmax or a draw; NO_TOKEN if there is none."""
        logits = self._logits[row][node]
        if self._params.greedy:
            return best_token(logits)
        return self.sources[row].draw(probabilities(logits, self._params))

    def distribution(self, row: int, node: int) -> Tensor:
        """Return the distribution [V] behind a node."""
        return probabilities(self._logits[row][node], self._params)

    def odds(self, row: int, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        """Return p / q of the token drafted behind a node."""
        return target_prob[token].item() / draft_prob[token].item()


class _AheadNumbers(_LazyNumbers):
    """The same numbers, computed for all rows beforehand."""

    def __init__(self, trees: Sequence[DraftTree | None], logits: Tensor, sampler: Sampler):
        super().__init__(logits, sampler)
        if sampler.greedy:
            self._choices = best_tokens(logits).tolist()
            return
        self._distributions = probabilities(logits, self._params)  # [B, n, V]
        drawn = {row: tree for row, tree in enumerate(trees) if tree is not None and tree.draft_prob is not None}
        if drawn:
            self._odds = dict(zip(drawn, self._chain_odds(drawn), strict=True))
        if any(tree is not None and tree.draft_prob is None and tree.drawn is None for tree in trees):
            self._choices = self._draws(trees)

    def _chain_odds(self, chains: dict[int, DraftTree]) -> list[list[float]]:
        """Return p / q of the drafted tokens, [R, K]; entries behind a shorter chain are undefined."""
        device = self._distributions.device
        drafted = pad_sequence([torch.tensor(tree.tokens) for tree in chains.values()], batch_first=True)
        tokens = to_device(drafted, device)[..., None]  # [R, K, 1]
        drawn_from = [q for tree in chains.values() if (q := tree.draft_prob) is not None]
        draft_prob = pad_sequence([q if isinstance(q, Tensor) else torch.stack(list(q)) for q in drawn_from], True)
        p = self._distributions[to_device(list(chains), device), : tokens.shape[1]].gather(-1, tokens)
        return (p.double() / draft_prob.gather(-1, tokens).double())[..., 0].tolist()

    def _draws(self, trees: Sequence[DraftTree | None]) -> list[list[int]]:
        """Return what each row's source would draw at every node if the walk got there, [B, n].

        A walk draws once at each depth, so nodes of one depth share a uniform.
        """
        rows = []
        for tree, source in zip(trees, self.sources, strict=True):
            depths = [0]
            is_drawn = tree is not None and (tree.draft_prob is not None or tree.drawn is not None)
            for parent in () if tree is None or is_drawn else tree.parents:
                depths.append(depths[parent + 1] + 1)
            coming = source.peek(max(depths) + 1) if isinstance(source, TorchSource) else [0.0] * len(depths)
            rows.append(torch.tensor([coming[depth] for depth in depths], dtype=torch.float64))
        uniforms = to_device(pad_sequence(rows, batch_first=True), self._distributions.device)
        distributions = self._distributions[:, : uniforms.shape[1]]
        return draw_rows(distributions.flatten(0, 1), uniforms.flatten()).view(uniforms.shape).tolist()

    def choice(self, row: int, node: int) -> int:
        source = self.sources[row]
        if not self._params.greedy:
            if not isinstance(source, TorchSource):
                return super().choice(row, node)
            # Consume what `_draws` has peeked at.
            source.uniform()
        return self._choices[row][node]

    def distribution(self, row: int, node: int) -> Tensor:
        return self._distributions[row, node]

    def odds(self, row: int, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        return self._odds[row][node]
