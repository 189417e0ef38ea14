"""Which drafted tokens the target keeps: one walk from the root for chains and trees, greedy and sampling, row by row.

On a CPU rows of logits are looked at lazily: a softmax over the vocabulary is taken only at nodes that the walk visits.
On a GPU all of them are, so that every row's numbers come in one transfer or two; a row's source is asked for the same
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.modules.decoding.protocols import DraftTree, Verdict
from draftsmith.modules.decoding.typical import Typical
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import (
    Source,
    TorchSource,
    best_token,
    best_tokens,
    draw_each,
    draw_rows,
    probabilities,
    residual,
)
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import SamplingParams


def verify(
    trees: Sequence[DraftTree | None],
    logits: Tensor,
    params: SamplingParams,
    sources: Sequence[Source],
    ahead: bool | None = None,
) -> list[Verdict | None]:
    """Accept a path of every tree such that what is emitted follows the target exactly; None of a row that has none.

    logits: [B, n, V] of the target for the nodes it read, n > N: row 0 scores the root's children, row i+1 what follows
        node i; what follows the last node's is not looked at.
    ahead: work out what all walks may ask for beforehand; None does so on CUDA only.

    Greedy: walk while the target's argmax is a child. Sampling, nodes chosen deterministically: draw x ~ p and go to
    child x where there is one (the distribution of accepting with p(x) and renormalising). Sampling, a chain drawn from
    q: accept with min(1, p/q), else draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1). A tree that asks for
    typical acceptance gets it, and does not follow the target; greedily there is no difference.

    Raises:
        NonFinite: the target's numbers at a node that the walk visits; its position is the node's depth.
    """
    for tree in trees:
        if tree is not None and logits.shape[1] <= tree.num_read:
            expected = f"expected {tree.num_read + 1}, one a node and the root's"
            raise ValueError(f"logits: got {logits.shape[1]} rows, {expected}")
    ahead = logits.is_cuda if ahead is None else ahead
    numbers = _Ahead(trees, logits, params, sources) if ahead else _Lazy(logits, params, sources)
    verdicts: list[Verdict | None] = [None] * len(trees)
    drawn: list[tuple[int, int, Tensor]] = []  # (row, accepted tokens, distribution of the target's own)
    for row, tree in enumerate(trees):
        if tree is None:
            continue
        try:
            if tree.typical is not None and not params.greedy:
                verdicts[row] = _typical(tree, tree.typical, numbers, row, sources[row])
                continue
            if params.greedy or tree.draft_prob is None:
                verdicts[row] = _walk(tree, numbers.choice(row))
                continue
            accepted, distribution = _verify_chain(tree, numbers, row, sources[row])
        except NonFinite as error:
            error.row = row
            raise
        if distribution is None:
            verdicts[row] = Verdict(tuple(range(accepted)), None)
        else:
            drawn.append((row, accepted, distribution))
    if drawn:
        rows, counts, distributions = zip(*drawn, strict=True)
        try:
            own = draw_each(distributions, [sources[row] for row in rows])
        except NonFinite as error:
            place = error.row or 0
            error.row = rows[place]
            raise error.passed(offset=counts[place]) from None
        for row, accepted, token in zip(rows, counts, own, strict=True):
            verdicts[row] = Verdict(tuple(range(accepted)), token)
    return verdicts


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


def _typical(tree: DraftTree, rule: Typical, numbers: _Lazy, row: int, source: Source) -> Verdict:
    """The path that the rule accepts, then a token of the target's own."""

    def distribution(node: int) -> Tensor:
        return numbers.distribution(row, node + 1)

    path = rule.path(tree.tokens, tree.parents, distribution)
    try:
        return Verdict(path, source.draw(distribution(path[-1] if path else -1)))
    except NonFinite as error:
        raise error.passed(offset=len(path)) from None


def _children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """(parent, token) -> node; of equal siblings the first."""
    found: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        found.setdefault((parent, token), node)
    return found


def _verify_chain(tree: DraftTree, numbers: _Lazy, row: int, source: Source) -> tuple[int, Tensor | None]:
    """How many of a drawn chain's tokens are accepted, and the distribution of the target's own; None where it has
    none."""
    assert tree.draft_prob is not None
    accepted = 0
    try:
        for accepted, token in enumerate(tree.tokens):
            target_prob, draft_prob = numbers.distribution(row, accepted), tree.draft_prob[accepted]
            ratio = numbers.odds(row, accepted, token, target_prob, draft_prob)
            if ratio != ratio:  # and min(1, NaN) is 1
                raise NonFinite("probabilities")
            if not source.accept(min(1.0, ratio)):
                return accepted, residual(target_prob, draft_prob)
        accepted = len(tree.tokens)
        return accepted, None if tree.last_unread else numbers.distribution(row, accepted)
    except NonFinite as error:
        raise error.passed(offset=accepted) from None


class _Lazy:
    """Numbers of the target, worked out when a walk asks for them. Node 0 is the root here, node i + 1 the tree's i."""

    def __init__(self, logits: Tensor, params: SamplingParams, sources: Sequence[Source]):
        self._logits, self._params, self._sources = logits.unbind(), params, sources

    def choice(self, row: int) -> Callable[[int], int]:
        """The target's choice of what follows a node of this row: its argmax, or a draw."""
        logits, params, source = self._logits[row], self._params, self._sources[row]
        if params.greedy:
            return lambda node: best_token(logits[node])
        return lambda node: source.draw(probabilities(logits[node], params))

    def distribution(self, row: int, node: int) -> Tensor:
        """[V] of what follows a node."""
        return probabilities(self._logits[row][node], self._params)

    def odds(self, row: int, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        """p / q of the token that was drafted behind a node."""
        return target_prob[token].item() / draft_prob[token].item()


class _Ahead(_Lazy):
    """Numbers as of `_Lazy`, worked out for all rows beforehand."""

    def __init__(
        self,
        trees: Sequence[DraftTree | None],
        logits: Tensor,
        params: SamplingParams,
        sources: Sequence[Source],
    ):
        super().__init__(logits, params, sources)
        if params.greedy:
            self._choices = best_tokens(logits).tolist()
            return
        self._distributions = probabilities(logits, params)
        chains = [row for row, tree in enumerate(trees) if tree is not None and tree.draft_prob is not None]
        self._odds = dict(zip(chains, self._chain_odds([(row, trees[row]) for row in chains]), strict=True))
        if len(chains) < sum(tree is not None for tree in trees):
            self._choices = self._draws(trees)

    def _chain_odds(self, chains: Sequence[tuple[int, Any]]) -> list[list[float]]:
        """[B', K] p / q of the drafted tokens; what stands behind a shorter chain means nothing."""
        if not chains:
            return []
        device = self._distributions.device
        drafted = pad_sequence([torch.tensor(tree.tokens) for _, tree in chains], batch_first=True)
        tokens = to_device(drafted, device)[..., None]
        draft_prob = pad_sequence([tree.draft_prob for _, tree in chains], batch_first=True)
        rows = to_device([row for row, _ in chains], device)
        p = self._distributions[rows, : tokens.shape[1]].gather(-1, tokens)
        return (p.double() / draft_prob.gather(-1, tokens).double())[..., 0].tolist()

    def _draws(self, trees: Sequence[DraftTree | None]) -> list[list[int]]:
        """[B, n] what each row's source would draw at every node, were the walk to come there."""
        rows = []
        for tree, source in zip(trees, self._sources, strict=True):
            depths = [0]
            for parent in () if tree is None or tree.draft_prob is not None else tree.parents[: tree.num_read]:
                depths.append(depths[parent + 1] + 1)
            coming = source.peek(max(depths) + 1) if isinstance(source, TorchSource) else [0.0] * len(depths)
            rows.append(torch.tensor([coming[depth] for depth in depths], dtype=torch.float64))
        uniforms = to_device(pad_sequence(rows, batch_first=True), self._distributions.device)
        distributions = self._distributions[:, : uniforms.shape[1]]
        return draw_rows(distributions.flatten(0, 1), uniforms.flatten()).view(uniforms.shape).tolist()

    def choice(self, row: int) -> Callable[[int], int]:
        source, greedy = self._sources[row], self._params.greedy
        if not greedy and not isinstance(source, TorchSource):
            return super().choice(row)

        def choice(node: int) -> int:
            if not greedy and isinstance(source, TorchSource):
                source.uniform()  # which `_draws` has looked at
            token = self._choices[row][node]
            if token == NO_TOKEN:
                raise NonFinite("logits" if greedy else "probabilities")
            return token

        return choice

    def distribution(self, row: int, node: int) -> Tensor:
        return self._distributions[row, node]

    def odds(self, row: int, node: int, token: int, target_prob: Tensor, draft_prob: Tensor) -> float:
        return self._odds[row][node]
