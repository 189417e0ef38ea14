"""What the target says about single nodes of draft trees: where they stand, how sure the head was, and whether they are
accepted once their parent is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.studies.common import mean
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.sampling import best_token, probabilities
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Node:
    """A node whose parent was accepted (or is the root).

    index: among the tree's nodes. confidence: probability that the head gave the token after its parent; None where
    the tree does not say. accepted: probability that the target goes on with it: 1 or 0 greedy, p(token) sampling,
    which is what the verdict is drawn with.
    """

    prompt: str
    task: str
    index: int
    confidence: float | None
    accepted: float


def nodes_of(prompt: BenchPrompt, done: Round, params: SamplingParams, eos_ids: Sequence[int]) -> Iterator[Node]:
    """The nodes of one round that have a verdict; none below an accepted end token, after which nothing counts."""
    tree, verdict = done.tree, done.verdict
    if tree is None or verdict is None or done.logits is None:
        return
    alive = [-1]
    for node in verdict.path:
        if tree.tokens[node] in eos_ids:
            break
        alive.append(node)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    for parent in alive:
        logits = done.logits[parent + 1]
        probs = None if params.greedy else probabilities(logits, params)
        best = best_token(logits) if probs is None else None
        for node in children.get(parent, []):
            token = tree.tokens[node]
            accepted = float(token == best) if probs is None else float(probs[token])
            yield Node(prompt.id, prompt.task, node, node_confidence(tree, node), accepted)


def node_confidence(tree: DraftTree, node: int) -> float | None:
    """Probability by the head: a node's value is the log-probability of its path (EAGLE-2, section 4.1)."""
    if tree.values is None:
        return None
    parent = tree.parents[node]
    return math.exp(tree.values[node] - (tree.values[parent] if parent >= 0 else 0.0))


def node_names(shape: StaticTree) -> list[str]:
    """Name of every node: the ranks on its path, `0.1` is the second child of the root's best child."""
    names: list[str] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        names.append(f"{names[parent]}.{rank}" if parent >= 0 else str(rank))
    return names


@dataclass(frozen=True)
class Bin:
    """Nodes of similar confidence: means, and a 95 % bootstrap interval of acceptance over prompts."""

    confidence: float
    accepted: float
    low: float | None
    high: float | None
    count: int


def by_confidence(nodes: Sequence[Node], count: int, seed: int) -> list[Bin]:
    """`count` bins of equal width over [0, 1]; those without a node are left out."""
    places = [min(int((node.confidence or 0.0) * count), count - 1) for node in nodes]
    found = []
    for place in sorted(set(places)):
        own = [node for node, there in zip(nodes, places, strict=True) if there == place]
        accepted = [node.accepted for node in own]
        low, high = mean_interval(accepted, [node.prompt for node in own], seed)
        average = mean([node.confidence or 0.0 for node in own]), mean(accepted)
        assert average[0] is not None and average[1] is not None
        found.append(Bin(average[0], average[1], low, high, len(own)))
    return found


def correlation(nodes: Sequence[Node]) -> float | None:
    """Pearson's, of confidence and acceptance; None where one of them never varies."""
    pairs = np.array([(node.confidence or 0.0, node.accepted) for node in nodes]).reshape(-1, 2)
    if len(pairs) < 2 or not pairs.std(0).all():
        return None
    return float(np.corrcoef(pairs.T)[0, 1])


@dataclass(frozen=True)
class TreePosition:
    """A position of the static tree. low, high: quartiles of the prompts' own acceptance rates there."""

    name: str
    depth: int
    accepted: float
    low: float
    high: float
    count: int


def by_position(nodes: Sequence[Node], shape: StaticTree) -> list[TreePosition]:
    """Acceptance at every position that was reached, given that its parent was accepted."""
    names, found = node_names(shape), []
    for index, name in enumerate(names):
        own = [node for node in nodes if node.index == index]
        if not own:
            continue
        rates = [
            np.mean([node.accepted for node in own if node.prompt == prompt])
            for prompt in dict.fromkeys(node.prompt for node in own)
        ]
        low, high = np.percentile(rates, [25, 75])
        average = float(np.mean([node.accepted for node in own]))
        found.append(TreePosition(name, shape.depths[index], average, float(low), float(high), len(own)))
    return found
