"""Single nodes of draft trees: where they stand, how sure the head was, and whether they are accepted once their parent
is (EAGLE-2, figures 5 and 6).

A node is a row: mode, prompt and task; node, its number in the tree; confidence, the probability that the head gave its
token after its parent, None where the tree does not say; accepted, the probability that the target goes on with it once
its parent is accepted: 1 or 0 greedy, p(token) sampling, which is what the verdict is drawn with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from draftsmith.data.console import Column, Row, Table, json_values
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.studies import common
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

COLUMNS = ["mode", "prompt", "task", "node", "confidence", "accepted"]
NUM_BINS = 10
MIN_REACHED = 5  # nodes of a cell: fewer say nothing


def nodes_of(prompt: BenchPrompt, done: Round, params: SamplingParams, eos_ids: Sequence[int]) -> Iterator[Row]:
    """The nodes of one round whose parent was accepted (or is the root); none below an accepted end token, after which
    nothing counts."""
    tree, verdict = done.tree, done.verdict
    if tree is None or verdict is None or done.logits is None:
        return
    named = {"mode": common.mode(params.temperature), "prompt": prompt.id, "task": prompt.task}
    alive = [-1]
    for node in verdict.path:
        if tree.tokens[node] in eos_ids:
            break
        alive.append(node)
    for parent in alive:
        probs = probabilities(done.logits[parent + 1], params)
        for node, token in enumerate(tree.tokens):
            if tree.parents[node] == parent:
                confidence = node_confidence(tree, node)
                yield {**named, "node": node, "confidence": confidence, "accepted": float(probs[token])}


def node_confidence(tree: DraftTree, node: int) -> float | None:
    """Probability by the head: a node's value is the log-probability of its path (EAGLE-2, section 4.1)."""
    if tree.values is None:
        return None
    parent = tree.parents[node]
    return math.exp(tree.values[node] - (tree.values[parent] if parent >= 0 else 0.0))


def node_tables(static: pd.DataFrame, dynamic: pd.DataFrame, shape: StaticTree, seed: int) -> list[Table]:
    """static: nodes of the static tree `shape`. dynamic: nodes of trees that say how sure the head was."""
    confidence = [
        {
            "mode": mode, "nodes": len(own), "confidence": own["confidence"].mean(),
            "accepted": own["accepted"].mean(), "correlation": own["confidence"].corr(own["accepted"]),
        }
        for mode, own in dynamic.groupby("mode", sort=False)
    ]  # fmt: skip
    columns = [
        Column("mode", "mode"), Column("nodes", "nodes", ",d"), Column("confidence", "mean confidence", ".3f"),
        Column("accepted", "mean acceptance", ".3f"), Column("correlation", "correlation", ".3f"),
    ]  # fmt: skip
    note = "Nodes of dynamic trees whose parent was accepted; Pearson's correlation of confidence and acceptance."
    return [
        drawn_data("eagle2-acceptance-by-position", position_rows(static, shape)),
        drawn_data("eagle2-acceptance-by-task", task_rows(static, shape)),
        drawn_data("eagle2-acceptance-by-confidence", confidence_rows(dynamic, seed)),
        Table("eagle2-confidence", "Does confidence say what is accepted?", columns, json_values(confidence), note),
    ]


def node_names(shape: StaticTree) -> list[str]:
    """Name of every node: the ranks on its path, `0.1` is the second child of the root's best child."""
    names: list[str] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        names.append(f"{names[parent]}.{rank}" if parent >= 0 else str(rank))
    return names


def position_rows(nodes: pd.DataFrame, shape: StaticTree) -> Iterator[Row]:
    """Figure 5. low, high: quartiles of the prompts' own acceptance rates at the position."""
    names = node_names(shape)
    for (mode, node), own in nodes.groupby(["mode", "node"]):
        low, high = own.groupby("prompt")["accepted"].mean().quantile([0.25, 0.75])
        place = {"mode": mode, "position": names[node], "depth": shape.depths[node], "reached": len(own)}
        yield {**place, "accepted": own["accepted"].mean(), "low": low, "high": high}


def task_rows(nodes: pd.DataFrame, shape: StaticTree) -> Iterator[Row]:
    """Figure 5, context by context, in the tree's order; cells that were reached too seldom are left out."""
    names = node_names(shape)
    for (node, mode, task), own in nodes.groupby(["node", "mode", "task"]):
        if len(own) >= MIN_REACHED:
            cell = {"mode": mode, "task": task or "all", "position": names[node]}
            yield {**cell, "accepted": own["accepted"].mean(), "reached": len(own)}


def confidence_rows(nodes: pd.DataFrame, seed: int) -> Iterator[Row]:
    """Figure 6: bins of equal width over [0, 1], those without a node left out, with 95 % intervals over prompts."""
    bins = (nodes["confidence"] * NUM_BINS).astype(int).clip(upper=NUM_BINS - 1)
    for (mode, _), own in nodes.groupby(["mode", bins]):
        low, high = mean_interval(own["accepted"], own["prompt"], seed)
        means = {"confidence": own["confidence"].mean(), "accepted": own["accepted"].mean()}
        yield {"mode": mode, "nodes": len(own), **means, "low": low, "high": high}
