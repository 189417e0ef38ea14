"""EAGLE heads that draft trees: EAGLE-1's static tree and EAGLE-2's dynamic one (Li et al. 2024, both papers)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.tree import TreePredictor
from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.protocols import DraftTree, Outcome, Source
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.tree import StaticTree, best_connected
from draftsmith.modules.drafters.eagle.chain import EagleDrafter
from draftsmith.modules.drafters.eagle.net import EagleNet
from draftsmith.modules.finite import NonFinite, blame
from draftsmith.modules.graphs import Graphed
from draftsmith.modules.lean import as_bias
from draftsmith.modules.lean_rows import RowsStack, fixed_span
from draftsmith.modules.sampling import top_values
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's settings (section 4): the `topk` best of a level are expanded, `depth` times; the target scores the
    `nodes` best of all candidates.

    value: rank by the product of confidences along the path; else by a node's own confidence (the paper's ablation). A
        head's probabilities take the place of confidences where the drafter has one.
    rerank: choose among all candidates; else keep the nodes that were expanded or would be next, level by level.
    """

    nodes: int = 60
    depth: int = 6
    topk: int = 10
    value: bool = True
    rerank: bool = True


@dataclass(frozen=True)
class _Level:
    """What the head said about the nodes of one level, and what they can see."""

    hidden: Tensor  # [n, H]
    logits: Tensor  # [n, V]
    bias: Tensor  # [n, S] added to attention scores: 0 where a node sees one of the S slots after the committed rows


class EagleTreeDrafter(EagleDrafter):
    """Drafts a tree, level by level: one forward of the head a level. Its nodes are chosen, not drawn."""

    def __init__(
        self,
        head: EagleNet,
        target: CausalLM,
        shape: StaticTree | DynamicTree,
        capacity: int,
        static: bool | None = None,
        judge: AcceptanceHead | None = None,
        rule: TreeRule | None = None,
    ):
        """static: levels in few shapes, for CUDA graphs; None takes them on CUDA only. judge: a head that judges trees,
        whose probabilities are the nodes' values. rule: how far a dynamic tree is to grow,
        and how many of its `nodes` to take."""
        super().__init__(head, target, FixedLength(1), capacity)
        assert rule is None or (isinstance(shape, DynamicTree) and shape.value and shape.rerank)
        self.shape, self.rule = shape, rule
        self._judge = None if judge is None else TreePredictor(judge, target.embed, target.info.vocab_size)
        self._static = target.device.type == "cuda" if static is None else static
        if isinstance(shape, DynamicTree):
            room, width = shape.depth * shape.topk, shape.topk
        else:
            room = width = len(shape.parents)
        # Nodes of one level share a position but not a slot: the cache is wider than the context.
        self._rows = RowsStack(self.stack, 1, fixed_span(self._positions + room))
        self._cache = self._rows.row(0)
        self._forward = Graphed(self._read_nodes)
        own = torch.eye(width, dtype=torch.bool, device=target.device)
        self._own_bias = as_bias(own, target.dtype)  # nodes of a level see themselves and not each other

    @blame("eagle")
    def propose(self, max_drafted: int, params: SamplingParams, source: Source) -> DraftTree:
        assert self._features is not None
        cache = self._cache
        self._num_drafted = self.draft_calls = 0
        max_depth = min(max_drafted, self._positions - cache.length - len(self._ids) + 1)
        if max_depth < 1:
            return DraftTree((), ())
        hidden = self._read(self._ids, self._features)[-1:]
        committed = cache.length
        self.draft_calls = 1
        root = _Level(hidden, self._target.lm_head(hidden), hidden.new_zeros(1, 0))
        if isinstance(self.shape, StaticTree):
            tree = self._grow_static(self.shape, root, max_depth)
        else:
            tree = self._grow_dynamic(self.shape, root, max_depth, params)
        cache.keep(committed)
        self._ids, self._features = [], None
        self._num_drafted = len(tree.tokens)
        return tree

    def advance(self, outcome: Outcome) -> None:
        if self.rule is not None and self._num_drafted:
            self.rule.observe(self._num_drafted, self.draft_calls, outcome.num_accepted)
        super().advance(outcome)
        self._num_drafted = 0  # rounds that the context's end leaves without a draft are not this one

    def _expand(self, level: _Level, tokens: Tensor, above: Tensor, depth: int) -> _Level:
        """Read the nodes `tokens` [n] at `depth` (1: the root's children); parents: rows `above` of `level`."""
        cache, count = self._cache, len(tokens)
        committed = cache.length - level.bias.shape[1]
        bias = torch.cat([level.bias[above], self._own_bias[:count, :count]], 1)
        mask, position = F.pad(bias, (committed, 0)), committed + depth - 1
        if self._static:
            end = cache.length + count
            mask = F.pad(mask, (0, fixed_span(end) - end), value=-torch.inf)
            positions = torch.full((count,), position, device=tokens.device)
            slots = torch.arange(cache.length, end, device=tokens.device)
            logits, hidden = self._forward(tokens, level.hidden[above], positions, slots, mask)
        else:
            cos, sin = self.stack.cos[position], self.stack.sin[position]
            hidden = self.stack.run(self._fuse(tokens, level.hidden[above]), cos, sin, cache, mask, False)
            logits = self._target.lm_head(hidden)
        cache.length += count
        self.draft_calls += 1
        return _Level(hidden, logits, bias)

    def _read_nodes(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and hidden [n, H] of nodes; arguments as `RowsStack.nodes` takes them."""
        hidden = self._rows.nodes(self._fuse(tokens, features), positions, slots, bias)
        return self._target.lm_head(hidden), hidden

    def _grow_static(self, shape: StaticTree, root: _Level, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        level, places = root, {-1: 0}  # node -> its row in `level`
        for depth in range(1, max(shape.depths) + 1):
            nodes = shape.level(depth)
            if depth > max_depth or not nodes:
                break
            width = max(shape.ranks[node] for node in nodes) + 1
            best = level.logits.topk(min(width, level.logits.shape[-1]), dim=-1)
            # One transfer: tokens are exact in float64, and a token of no finite logit makes the row's first one NaN.
            first = best.values[:, :1].double()
            rows = torch.cat([first - first, best.indices.double()], 1).tolist()
            if any(mark != 0 for mark, *_ in rows):
                raise NonFinite(position=depth - 1)
            ranked = [list(map(int, row[1:])) for row in rows]
            tokens += [ranked[places[shape.parents[node]]][shape.ranks[node]] for node in nodes]
            inner = [node for node in nodes if node in shape.parents]
            if not inner or depth == max_depth:
                break
            above = torch.tensor([places[shape.parents[node]] for node in inner], device=root.hidden.device)
            ids = torch.tensor([tokens[node] for node in inner], device=root.hidden.device)
            level = self._expand(level, ids, above, depth)
            places = {node: row for row, node in enumerate(inner)}
        return DraftTree(tuple(tokens), shape.parents[: len(tokens)])

    def _children(self, level: _Level, depth: int, count: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, k] and tokens [n, k] of the children, at `depth`, that the head thinks most probable,
        best first by what it thinks; the probabilities are the judge's where there is one."""
        log_law = level.logits.to(torch.promote_types(level.logits.dtype, torch.float32)).log_softmax(-1)
        log_prob, tokens = top_values(log_law, min(count, log_law.shape[-1]))
        if self._judge is None:
            return log_prob, tokens
        judged = self._judge.log_prob(level.hidden, level.logits, log_law, tokens, depth, params)
        return judged.to(log_prob.dtype), tokens

    def _grow_dynamic(self, shape: DynamicTree, root: _Level, max_depth: int, params: SamplingParams) -> DraftTree:
        log_prob, tokens = self._children(root, 1, shape.topk, params)
        parents = torch.full_like(tokens[0], -1)
        all_tokens, all_parents, all_values = [tokens[0]], [parents], [log_prob[0]]
        # The frontier: candidates to expand, by number, best first.
        frontier = _best(log_prob[0], shape.topk)
        level, above = root, torch.zeros_like(frontier)
        frontier_tokens, values, kept = tokens[0][frontier], log_prob[0][frontier], [frontier]
        count = len(frontier)
        for depth in range(1, min(shape.depth, max_depth - 1) + 1):
            if self.rule is not None and not self.rule.deeper(values.tolist):
                break
            level = self._expand(level, frontier_tokens, above, depth)
            log_prob, tokens = self._children(level, depth + 1, shape.topk, params)
            grown = log_prob + values[:, None] if shape.value else log_prob
            all_tokens.append(tokens.flatten())
            all_values.append(grown.flatten())
            all_parents.append(frontier.repeat_interleave(tokens.shape[1]))
            chosen = _best(grown.flatten(), shape.topk)
            above, frontier = chosen // tokens.shape[1], chosen + count
            frontier_tokens, values = tokens.flatten()[chosen], grown.flatten()[chosen]
            kept.append(frontier)
            count += tokens.numel()
        candidates = _Candidates(torch.cat(all_tokens), torch.cat(all_parents), torch.cat(all_values))
        if not shape.rerank:
            return candidates.tree(torch.cat(kept)[: shape.nodes].sort().values)
        if shape.value:
            # A path's product never grows, so the best form a tree, and of equal ones the parent comes first.
            best = _best(candidates.values, shape.nodes)
            if self.rule is not None:
                best = best[: self.rule.choose(candidates.values[best].tolist())]
            return candidates.tree(best.sort().values)
        confidences = candidates.values.tolist()
        if any(value != value for value in confidences):
            raise NonFinite
        taken = best_connected(candidates.parents.tolist(), confidences, shape.nodes)
        return candidates.tree(torch.tensor(taken, device=tokens.device))


@dataclass(frozen=True)
class _Candidates:
    """All nodes a tree may consist of: tokens, parents (their numbers here; -1 is the root) and values, each [N]."""

    tokens: Tensor
    parents: Tensor
    values: Tensor

    def tree(self, taken: Tensor) -> DraftTree:
        """The tree of the candidates `taken` (ascending, with every parent)."""
        parents = self.parents[taken]
        parents = torch.where(parents < 0, parents, torch.searchsorted(taken, parents))
        # One transfer: tokens, places and float32 values are exact in float64.
        rows = torch.stack([self.tokens[taken].double(), parents.double(), self.values[taken].double()]).tolist()
        if any(value != value for value in rows[2]):  # a NaN is sorted before all numbers
            raise NonFinite
        return DraftTree(tuple(map(int, rows[0])), tuple(map(int, rows[1])), values=tuple(rows[2]))


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest, best first; of equal values the lowest index first."""
    return values.sort(descending=True, stable=True).indices[:count]
