"""Grow draft trees for rows of sequences: EAGLE-1's static trees and EAGLE-2's dynamic ones (Li et al. 2024, both
papers).

Both work over a callable that expands nodes, for any drafter that drafts level by level. Nodes are chosen; those of a
static tree may be drawn. A row's tree is what it would be alone: levels of rows that have stopped are padding.

B rows, n nodes of a level, k children of each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, DynamicTree, StaticTree
from draftsmith.modules.decoding.tree_rule import TreeRule
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Sampler, probabilities, top_values, wide, without
from draftsmith.modules.transfer import to_device_together


class Level(NamedTuple):
    """Drafter states of the nodes of one level, and the logits of what follows them."""

    hidden: Tensor  # [B, n, H]
    logits: Tensor  # [B, n, V]


# (tokens [B, n], parent_rows [B, n], depth) -> Level. parent_rows index the previous level; depth 1 is the root's
# children.
Expand = Callable[[Tensor, Tensor, int], Level]


@dataclass(frozen=True)
class _StaticLevel:
    """Indices of a level's n nodes, on a device.

    width: children to look at. above, ranks: [n], each node's parent row in the previous level, and which child it is.
    inner, inner_above: [m], the nodes that have children, and their parents' rows.
    """

    width: int
    above: Tensor
    ranks: Tensor
    inner: Tensor
    inner_above: Tensor


@functools.lru_cache(maxsize=16)
def _static_levels(shape: StaticTree, device: torch.device) -> tuple[_StaticLevel, ...]:
    """Send a tree's indices to a device, once for all drafts."""
    # Node -> its row in the level that was read last.
    levels, places = list[_StaticLevel](), {-1: 0}
    with torch.inference_mode(False):  # whoever asks first
        for depth in range(1, shape.levels + 1):
            nodes = shape.level(depth)
            above, ranks = [places[shape.parents[node]] for node in nodes], [shape.ranks[node] for node in nodes]
            inner = [i for i, node in enumerate(nodes) if node in shape.parents]
            indices = to_device_together([above, ranks, inner, [above[i] for i in inner]], device)
            levels.append(_StaticLevel(max(ranks) + 1, *indices))
            places = {nodes[i]: row for row, i in enumerate(inner)}
    return tuple(levels)


def grow_static(
    shape: StaticTree, root: Level, expand: Expand, depths: Sequence[int], sampler: Sampler
) -> list[DraftTree]:
    """Grow a tree of ranks for each row, at most depths[b] deep (some 1 or more): levels deeper than that are left out.

    Children are the likeliest tokens; if the shape says so, and not greedily, they are drawn one after the other,
    without replacement. Where a distribution has fewer tokens than a node is to have drawn children, the others and
    their descendants are left out.

    Raises:
        NonFinite: a node's logits choose no token.
    """
    is_drawn, level, chosen = shape.drawn and not sampler.greedy, root, list[Tensor]()
    by_row: list[list[int]] = [[] for _ in depths]
    drawn: list[dict[int, Tensor]] = [{} for _ in depths]
    levels = _static_levels(shape, root.logits.device)[: max(depths)]
    for depth, nodes in enumerate(levels, 1):
        if is_drawn:
            tokens = _draw_level(shape, depth, level, by_row, drawn, depths, sampler)
        else:
            best = level.logits.topk(min(nodes.width, level.logits.shape[-1]), dim=-1)  # [B, m, width]
            tokens = torch.where(best.values[..., :1].isfinite(), best.indices, NO_TOKEN)[:, nodes.above, nodes.ranks]
        chosen.append(tokens)  # [B, n]
        if not len(nodes.inner) or depth == len(levels):
            break
        # NO_TOKEN has no embedding.
        read = tokens.index_select(1, nodes.inner).clamp_min(0)
        level = expand(read, nodes.inner_above.expand(len(depths), -1), depth)
    if not is_drawn:
        by_row = torch.cat(chosen, 1).tolist()
    trees = []
    for row, (own, most) in enumerate(zip(by_row, depths, strict=True)):
        kept = [node for node, depth in enumerate(shape.depths) if depth <= most and own[node] != NO_TOKEN]
        if not is_drawn and len(kept) < sum(depth <= most for depth in shape.depths):
            raise NonFinite(position=shape.depths[own.index(NO_TOKEN)] - 1, row=row)
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        parents = tuple([places[shape.parents[node]] for node in kept])
        q = {places[parent]: prob for parent, prob in drawn[row].items()} if is_drawn else None
        calls = min(len(chosen), most)
        tree = DraftTree(tuple([own[node] for node in kept]), parents, drawn=q, draft_calls=calls)
        trees.append(tree if kept else NO_DRAFT)
    return trees


def _draw_level(
    shape: StaticTree,
    depth: int,
    level: Level,
    by_row: Sequence[list[int]],
    drawn: Sequence[dict[int, Tensor]],
    depths: Sequence[int],
    sampler: Sampler,
) -> Tensor:
    """Draw the nodes [B, n] at `depth`, NO_TOKEN for those that are left out.

    level: of the nodes above that have children. by_row, drawn: each row's nodes so far and the distributions that they
    were drawn from, to which these are added.
    """
    nodes = shape.level(depth)
    parents = sorted({shape.parents[node] for node in nodes})
    distributions = probabilities(level.logits, sampler.params)  # [B, m, V]
    support = (distributions > 0).sum(-1).tolist()
    for row, most in enumerate(depths):
        tokens = [NO_TOKEN] * len(nodes)
        for place, parent in enumerate(parents):
            if depth > most or (parent >= 0 and by_row[row][parent] == NO_TOKEN):
                continue
            drawn[row][parent] = left = distributions[row, place]
            children, token = [i for i, node in enumerate(nodes) if shape.parents[node] == parent], NO_TOKEN
            for child in children[: max(1, support[row][place])]:
                left = left if token == NO_TOKEN else without(left, token)
                tokens[child] = token = sampler.sources[row].draw(left)
                if token == NO_TOKEN:
                    raise NonFinite(position=depth - 1, row=row)
        by_row[row] += tokens
    return torch.tensor([own[-len(nodes) :] for own in by_row], device=distributions.device)


def grow_dynamic(
    shape: DynamicTree,
    root: Level,
    expand: Expand,
    depths: Sequence[int],
    rules: Sequence[TreeRule] | None = None,
) -> list[DraftTree]:
    """Grow EAGLE-2's tree for each row, at most depths[b] deep (some 1 or more).

    Raises:
        NonFinite: a candidate's value is NaN.
    """
    log_prob, tokens = (part[:, 0] for part in _children(root, shape.topk))  # [B, k]
    # Candidates level by level: tokens, parents (numbers of candidates in this order, -1 is the root) and values.
    candidates = [(tokens, torch.full_like(tokens, -1), log_prob)]
    # Numbers of the candidates to expand, best first.
    frontier = _best(log_prob, shape.topk)
    above, count = torch.zeros_like(frontier), tokens.shape[1]
    frontier_tokens, values = tokens.gather(1, frontier), log_prob.gather(1, frontier)
    calls = [1] * len(depths)
    growing = [row for row, depth in enumerate(depths) if depth > 1]
    for depth in range(1, shape.depth + 1):
        growing = [row for row in growing if depth < depths[row]]
        if rules is not None:
            growing = [row for row in growing if rules[row].deeper(values[row].tolist)]
        if not growing:
            break
        level = expand(frontier_tokens, above, depth)
        for row in growing:
            calls[row] += 1
        log_prob, tokens = _children(level, shape.topk)  # [B, n, k]
        grown = (log_prob + values[..., None]).flatten(1)
        width = tokens.shape[2]
        tokens = tokens.flatten(1)  # [B, n * k]
        candidates.append((tokens, frontier.repeat_interleave(width, 1), grown))
        chosen = _best(grown, shape.topk)
        above, frontier = chosen // width, chosen + count
        frontier_tokens, values = tokens.gather(1, chosen), grown.gather(1, chosen)
        count += tokens.shape[1]
    return _trees(shape, candidates, calls, depths, rules)


def _children(level: Level, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and tokens [B, n, k] of each node's most probable children, best first."""
    logits = level.logits.flatten(0, 1)
    log_distribution = wide(logits).log_softmax(-1)
    log_prob, tokens = top_values(log_distribution, min(count, log_distribution.shape[-1]))
    shape = *level.logits.shape[:2], -1
    return log_prob.view(shape), tokens.view(shape)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the places of each row's `count` highest values, best first; of equal values the lowest place first."""
    return values.sort(descending=True, stable=True).indices[:, :count]


def _trees(
    shape: DynamicTree,
    candidates: Sequence[tuple[Tensor, Tensor, Tensor]],
    levels: Sequence[int],
    depths: Sequence[int],
    rules: Sequence[TreeRule] | None,
) -> list[DraftTree]:
    """Build each row's tree from its best candidates, in one transfer.

    levels: that each row has grown.
    """
    tokens, parents, values = (torch.cat(parts, 1) for parts in zip(*candidates, strict=True))
    # Candidates down to each level.
    ends = list(itertools.accumulate(part.shape[1] for part, _, _ in candidates))
    # What stands behind a row's own levels is padding, and comes last.
    if min(levels) < len(ends):
        own_ends = torch.tensor([ends[own - 1] for own in levels], device=values.device)
        numbers = torch.arange(values.shape[1], device=values.device)
        values = values.masked_fill(numbers >= own_ends[:, None], -torch.inf)
    # A path's product never grows, so the best form a tree; of equal ones the parent comes first.
    order = _best(values, shape.nodes)
    picked = [order, *(part.gather(1, order) for part in (tokens, parents, values))]
    # All are exact in float64.
    rows = torch.stack([part.double() for part in picked], 1).tolist()
    trees = []
    for row, columns in enumerate(rows):
        if depths[row] < 1:
            trees.append(NO_DRAFT)
            continue
        # Number of a candidate -> token, parent and value, in the order of choice.
        nodes = {
            int(number): (int(token), int(parent), value)
            for number, token, parent, value in zip(*columns, strict=True)
            if number < ends[levels[row] - 1]
        }
        # NaN is sorted before all numbers.
        if any([value != value for _, _, value in nodes.values()]):
            raise NonFinite(row=row)
        taken = list(nodes)
        if rules is not None:
            taken = taken[: rules[row].choose([nodes[number][2] for number in taken])]
        taken.sort()
        places = {-1: -1} | {number: place for place, number in enumerate(taken)}
        own_tokens, own_parents, own_values = zip(*[nodes[number] for number in taken], strict=True)
        above = tuple([places[parent] for parent in own_parents])
        trees.append(DraftTree(own_tokens, above, values=own_values, draft_calls=levels[row]))
    return trees
