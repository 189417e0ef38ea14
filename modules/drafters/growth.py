"""Growing draft trees for rows of sequences, over a callable that expands nodes: EAGLE-1's static trees and EAGLE-2's
dynamic ones (Li et al. 2024, both papers), for whatever drafts level by level. Nodes are chosen, not drawn.

A row's tree is what it would be alone: levels of rows that have stopped are padding. B rows, n nodes of a level, k
children of each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.protocols import NO_DRAFT, DraftTree
from draftsmith.modules.decoding.tree import StaticTree, best_connected
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import top_values
from draftsmith.modules.transfer import to_device_together


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's settings (section 4): the `topk` best of a level are expanded, `depth` times; the target scores the
    `nodes` best of all candidates.

    value: rank by the product of confidences along the path; else by a node's own confidence (the paper's ablation).
    rerank: choose among all candidates; else keep the nodes that were expanded or would be next, level by level.
    """

    nodes: int = 60
    depth: int = 6
    topk: int = 10
    value: bool = True
    rerank: bool = True


@dataclass(frozen=True)
class Level:
    """What a drafter says of the nodes of one level: its states, and the logits of what follows them."""

    hidden: Tensor  # [B, n, H]
    logits: Tensor  # [B, n, V]


# Read the nodes tokens [B, n] at a depth, 1 for the root's children; their parents are the rows above [B, n] of the
# level that was read last.
Expand = Callable[[Tensor, Tensor, int], Level]


@dataclass(frozen=True)
class _StaticLevel:
    """A level of n nodes as a device is asked for it. width: children that are looked at. above, ranks: [n], of each
    node its parent's row among what was read last, and which child it is; inner, inner_above: [m], the nodes that have
    children, and their parents' rows."""

    width: int
    above: Tensor
    ranks: Tensor
    inner: Tensor
    inner_above: Tensor


@functools.lru_cache(maxsize=16)
def _static_levels(shape: StaticTree, device: torch.device) -> tuple[_StaticLevel, ...]:
    """What `grow_static` has to know of a tree, on its device: sent there once, and not for every draft."""
    levels, places = list[_StaticLevel](), {-1: 0}  # node -> its row among what was read last
    with torch.inference_mode(False):  # whoever asks first
        for depth in range(1, max(shape.depths) + 1):
            nodes = shape.level(depth)
            above, ranks = [places[shape.parents[node]] for node in nodes], [shape.ranks[node] for node in nodes]
            inner = [i for i, node in enumerate(nodes) if node in shape.parents]
            indices = to_device_together([above, ranks, inner, [above[i] for i in inner]], device)
            levels.append(_StaticLevel(max(ranks) + 1, *indices))
            places = {nodes[i]: row for row, i in enumerate(inner)}
    return tuple(levels)


def grow_static(shape: StaticTree, root: Level, expand: Expand, depths: Sequence[int]) -> list[DraftTree]:
    """A tree of ranks for each row, down to depths[b] at most, some of them 1 or more. The host learns of its tokens
    when all are chosen.

    Raises:
        NonFinite: logits of a node that was expanded.
    """
    level, reached, chosen = root, 0, list[Tensor]()
    for depth, nodes in enumerate(_static_levels(shape, root.logits.device)[: max(depths)], 1):
        reached = depth
        best = level.logits.topk(min(nodes.width, level.logits.shape[-1]), dim=-1)
        tokens = torch.where(best.values[..., :1].isfinite(), best.indices, NO_TOKEN)
        chosen.append(tokens[:, nodes.above, nodes.ranks])
        if not len(nodes.inner) or depth == max(depths):
            break
        read = chosen[-1].index_select(1, nodes.inner).clamp_min(0)
        level = expand(read, nodes.inner_above.expand(len(depths), -1), depth)
    trees = []
    for row, (tokens, most) in enumerate(zip(torch.cat(chosen, 1).tolist(), depths, strict=True)):
        count = sum(depth <= most for depth in shape.depths)
        if NO_TOKEN in tokens[:count]:
            raise NonFinite(position=shape.depths[tokens.index(NO_TOKEN)] - 1, row=row)
        calls = min(reached, most)
        trees.append(DraftTree(tuple(tokens[:count]), shape.parents[:count], draft_calls=calls) if count else NO_DRAFT)
    return trees


def grow_dynamic(
    shape: DynamicTree,
    root: Level,
    expand: Expand,
    depths: Sequence[int],
    rules: Sequence[TreeRule] | None = None,
) -> list[DraftTree]:
    """EAGLE-2's tree for each row, down to depths[b] at most, some of them 1 or more.

    Raises:
        NonFinite: a candidate's value is none.
    """
    log_prob, tokens = (part[:, 0] for part in _children(root, shape.topk))
    # Candidates level by level: tokens, parents (their numbers, in this order; -1 is the root) and values, [B, n] each.
    found = [(tokens, torch.full_like(tokens, -1), log_prob)]
    frontier = _best(log_prob, shape.topk)  # candidates to expand, by number, best first
    kept = [frontier]
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
        log_prob, tokens = _children(level, shape.topk)
        grown = (log_prob + values[..., None] if shape.value else log_prob).flatten(1)
        width = tokens.shape[2]
        tokens = tokens.flatten(1)
        found.append((tokens, frontier.repeat_interleave(width, 1), grown))
        chosen = _best(grown, shape.topk)
        above, frontier = chosen // width, chosen + count
        frontier_tokens, values = tokens.gather(1, chosen), grown.gather(1, chosen)
        kept.append(frontier)
        count += tokens.shape[1]
    return _trees(shape, found, kept, calls, depths, rules)


def _children(level: Level, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, n, k] and tokens [B, n, k] of the children that the drafter thinks most probable, best
    first."""
    logits = level.logits.flatten(0, 1)
    log_distribution = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    log_prob, tokens = top_values(log_distribution, min(count, log_distribution.shape[-1]))
    shape = *level.logits.shape[:2], -1
    return log_prob.view(shape), tokens.view(shape)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of each row, best first; of equal values the lowest index first."""
    return values.sort(descending=True, stable=True).indices[:, :count]


def _trees(
    shape: DynamicTree,
    found: Sequence[tuple[Tensor, Tensor, Tensor]],
    kept: Sequence[Tensor],
    levels: Sequence[int],
    depths: Sequence[int],
    rules: Sequence[TreeRule] | None,
) -> list[DraftTree]:
    """A tree of the best candidates of each row, which has so many levels; one transfer. kept: numbers of the nodes
    that were expanded or would be next, of each level."""
    tokens, parents, values = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    ends = list(itertools.accumulate(part.shape[1] for part, _, _ in found))  # candidates down to each level
    numbers = torch.arange(values.shape[1], device=values.device)
    if not shape.rerank:
        order = torch.cat(list(kept), 1)
    elif shape.value:
        # What stands behind a row's own levels is padding, and comes last.
        if min(levels) < len(ends):
            own_ends = torch.tensor([ends[own - 1] for own in levels], device=values.device)
            values = values.masked_fill(numbers >= own_ends[:, None], -torch.inf)
        # A path's product never grows, so the best form a tree, and of equal ones the parent comes first.
        order = _best(values, shape.nodes)
    else:
        order = numbers.expand_as(values)
    picked = [order, *(part.gather(1, order) for part in (tokens, parents, values))]
    # Tokens, numbers and float32 values are exact in float64.
    rows = torch.stack([part.double() for part in picked], 1).tolist()
    made = []
    for row, columns in enumerate(rows):
        if depths[row] < 1:
            made.append(NO_DRAFT)
            continue
        nodes = {
            int(number): (int(token), int(parent), value)
            for number, token, parent, value in zip(*columns, strict=True)
            if number < ends[levels[row] - 1]
        }
        if any([value != value for _, _, value in nodes.values()]):  # a NaN is sorted before all numbers
            raise NonFinite(row=row)
        taken = _taken(shape, nodes, None if rules is None else rules[row])
        made.append(_tree(nodes, taken, levels[row]))
    return made


Nodes = dict[int, tuple[int, int, float]]  # number of a candidate -> token, parent and value, in the order of choice


def _taken(shape: DynamicTree, nodes: Nodes, rule: TreeRule | None) -> list[int]:
    """The numbers of the candidates that a row's tree consists of, ascending."""
    if shape.rerank and not shape.value:
        ascending = sorted(nodes)
        return best_connected([nodes[i][1] for i in ascending], [nodes[i][2] for i in ascending], shape.nodes)
    numbers = list(nodes)[: shape.nodes]
    if rule is not None:
        numbers = numbers[: rule.choose([nodes[number][2] for number in numbers])]
    return sorted(numbers)


def _tree(nodes: Nodes, taken: Sequence[int], calls: int) -> DraftTree:
    places = {-1: -1} | {number: place for place, number in enumerate(taken)}
    tokens, parents, values = zip(*[nodes[number] for number in taken], strict=True)
    return DraftTree(tokens, tuple([places[parent] for parent in parents]), values=values, draft_calls=calls)
