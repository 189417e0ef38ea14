"""Grow draft trees: EAGLE-1's static trees and EAGLE-2's dynamic ones (Li et al. 2024, both papers).

Both work over a callable that expands nodes, for any drafter that drafts level by level. Nodes are chosen; those of a
static tree may be drawn.

n nodes of a level, k children of each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Expand, Level
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, DynamicTree, StaticTree
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import Sampler, probabilities, top_values, wide, without
from draftsmith.modules.transfer import to_device_together


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


def grow_static(shape: StaticTree, root: Level, expand: Expand, most: int, sampler: Sampler) -> DraftTree:
    """Grow a tree of ranks, at most `most` (1 or more) deep: levels deeper than that are left out.

    Children are the likeliest tokens; if the shape says so, and not greedily, they are drawn one after the other,
    without replacement. Where a distribution has fewer tokens than a node is to have drawn children, the others and
    their descendants are left out.

    Raises:
        NonFinite: a node's logits choose no token.
    """
    is_drawn, level, chosen = shape.drawn and not sampler.greedy, root, list[Tensor]()
    tokens, drawn = list[int](), dict[int, Tensor]()  # of drawn nodes
    levels = _static_levels(shape, root.logits.device)[:most]
    for depth, nodes in enumerate(levels, 1):
        if is_drawn:
            tokens += _draw_level(shape, depth, level, tokens, drawn, sampler)
            own = torch.tensor(tokens[-len(nodes.ranks) :], device=root.logits.device)  # [n]
        else:
            best = level.logits.topk(min(nodes.width, level.logits.shape[-1]), dim=-1)  # [m, width]
            own = torch.where(best.values[:, :1].isfinite(), best.indices, NO_TOKEN)[nodes.above, nodes.ranks]
        chosen.append(own)
        if not len(nodes.inner) or depth == len(levels):
            break
        # NO_TOKEN has no embedding.
        level = expand(own.index_select(0, nodes.inner).clamp_min(0), nodes.inner_above, depth)
    if not is_drawn:
        tokens = torch.cat(chosen).tolist()
        if NO_TOKEN in tokens:
            raise NonFinite(position=shape.depths[tokens.index(NO_TOKEN)] - 1)
    kept = [node for node, token in enumerate(tokens) if token != NO_TOKEN]
    if not kept:
        return NO_DRAFT
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    parents = tuple([places[shape.parents[node]] for node in kept])
    q = {places[parent]: prob for parent, prob in drawn.items()} if is_drawn else None
    return DraftTree(tuple([tokens[node] for node in kept]), parents, drawn=q, draft_calls=len(chosen))


def _draw_level(
    shape: StaticTree, depth: int, level: Level, tokens: Sequence[int], drawn: dict[int, Tensor], sampler: Sampler
) -> list[int]:
    """Draw the n nodes at `depth`, NO_TOKEN for those that are left out.

    level: of the nodes above that have children. tokens: of the nodes so far. drawn: gets the distributions that these
    were drawn from, by parent.
    """
    nodes = shape.level(depth)
    parents = sorted({shape.parents[node] for node in nodes})
    distributions = probabilities(level.logits, sampler.params)  # [m, V]
    support = (distributions > 0).sum(-1).tolist()
    own = [NO_TOKEN] * len(nodes)
    for place, parent in enumerate(parents):
        if parent >= 0 and tokens[parent] == NO_TOKEN:
            continue
        drawn[parent] = left = distributions[place]
        children, token = [i for i, node in enumerate(nodes) if shape.parents[node] == parent], NO_TOKEN
        for child in children[: max(1, support[place])]:
            left = left if token == NO_TOKEN else without(left, token)
            own[child] = token = sampler.source.draw(left)
            if token == NO_TOKEN:
                raise NonFinite(position=depth - 1)
    return own


def grow_dynamic(shape: DynamicTree, root: Level, expand: Expand, most: int) -> DraftTree:
    """Grow EAGLE-2's tree, at most `most` (1 or more) deep.

    Raises:
        NonFinite: a candidate's value is NaN.
    """
    log_prob, tokens = (part[0] for part in _children(root, shape.topk))  # [k]
    # Candidates level by level: tokens, parents (numbers of candidates in this order, -1 is the root) and values.
    candidates = [(tokens, torch.full_like(tokens, -1), log_prob)]
    # Numbers of the candidates to expand, best first.
    frontier = _best(log_prob, shape.topk)
    above, count = torch.zeros_like(frontier), len(tokens)
    frontier_tokens, values = tokens[frontier], log_prob[frontier]
    for depth in range(1, min(shape.depth + 1, most)):
        log_prob, children = _children(expand(frontier_tokens, above, depth), shape.topk)  # [n, k]
        grown, tokens, width = (log_prob + values[:, None]).flatten(), children.flatten(), children.shape[1]  # [n * k]
        candidates.append((tokens, frontier.repeat_interleave(width), grown))
        chosen = _best(grown, shape.topk)
        above, frontier = chosen // width, chosen + count
        frontier_tokens, values = tokens[chosen], grown[chosen]
        count += len(tokens)
    return _tree(shape, candidates)


def _children(level: Level, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and tokens [n, k] of each node's most probable children, best first."""
    log_distribution = wide(level.logits).log_softmax(-1)
    return top_values(log_distribution, min(count, log_distribution.shape[-1]))


def _best(values: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest of values [m], best first; of equal values the lowest place first."""
    return values.sort(descending=True, stable=True).indices[:count]


def _tree(shape: DynamicTree, candidates: Sequence[tuple[Tensor, Tensor, Tensor]]) -> DraftTree:
    """Build the tree of the best candidates, in one transfer."""
    tokens, parents, values = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    # A path's product never grows, so the best form a tree; of equal ones the parent comes first.
    order = _best(values, shape.nodes)
    picked = [order, tokens[order], parents[order], values[order]]
    # All are exact in float64.
    columns = torch.stack([part.double() for part in picked]).tolist()
    # Number of a candidate -> token, parent and value, in the order of choice.
    nodes = {
        int(number): (int(token), int(parent), value) for number, token, parent, value in zip(*columns, strict=True)
    }
    # NaN is sorted before all numbers.
    if any([value != value for _, _, value in nodes.values()]):
        raise NonFinite()
    taken = sorted(nodes)
    places = {-1: -1} | {number: place for place, number in enumerate(taken)}
    own_tokens, own_parents, own_values = zip(*[nodes[number] for number in taken], strict=True)
    above = tuple([places[parent] for parent in own_parents])
    return DraftTree(own_tokens, above, values=own_values, draft_calls=len(candidates))
