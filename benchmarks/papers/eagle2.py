"""Repeat the experiments of EAGLE-2 (Li et al. 2024) with an EAGLE head.

    make demo
    python benchmarks/papers/eagle2.py --head runs/demo/quick/eagle-head/best --output runs/eagle2

Acceptance by position in a static tree (figure 5) and by confidence (figure 6), and the speed-up by nodes and depth.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from draftsmith.benchmarks.papers import common
from draftsmith.benchmarks.papers.common import Row, mean_interval
from draftsmith.data.console import Column, Table, json_values
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import read_tree
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import InputError, SamplingParams, check_range

NODE_COLUMNS = ["mode", "prompt", "task", "node", "confidence", "accepted"]
NUM_BINS = 10
MIN_REACHED = 5  # nodes of a cell: fewer say nothing


@dataclass(frozen=True, kw_only=True)
class Eagle2Config(common.PaperConfig):
    """Repeats the experiments of EAGLE-2 with an EAGLE head that was trained for the target.

    Attributes:
        head: Directory of the EAGLE head.
        tree: Static tree whose positions are shown: a shipped name, or a YAML list of paths of ranks.
        topk: Children per node, and nodes expanded at once.
        nodes: Numbers of nodes to measure, separated by commas, each with every depth. The largest size shows
            confidence.
        depths: Depths to measure.
    """

    tree: str = "eagle-1"
    topk: int = 10
    nodes: str = "4,8,16,32,60"
    depths: str = "2,4,6"

    @property
    def sizes(self) -> list[str]:
        """Methods of every combination of nodes and depth."""
        counts, levels = (comma_numbers(name, getattr(self, name), int) for name in ("nodes", "depths"))
        return [f"eagle-tree:nodes={count}:depth={depth}:topk={self.topk}" for depth in levels for count in counts]


@sole_writer()
def run(config: Eagle2Config) -> Path:
    """Decode and measure; write OUTPUT/results.json."""
    if "eagle" not in config.drafters:
        given = ", ".join(config.drafters.values()) or "nothing"
        raise InputError("head", given, "an EAGLE head", "Pass --head: a head of `draftsmith train eagle`.")
    check_range("topk", config.topk, 1)
    static, largest = f"eagle-static:tree={config.tree}", config.sizes[-1]
    loaded = common.load(config, [*config.sizes, static])
    nodes = {label: watch_nodes(config, loaded, label) for label in (static, largest)}
    tables = [
        *node_tables(nodes[static], nodes[largest], read_tree(config.tree), config.seed),
        size_table(
            {**row, "mode": common.mode_name(params)}
            for params in config.modes
            for row in common.measure(config, config.sizes, params).values()
        ),
    ]
    return common.write_results("eagle2", config, loaded, tables)


def watch_nodes(config: Eagle2Config, loaded: common.Loaded, label: str) -> pd.DataFrame:
    """Decode all prompts with one method and return its nodes that have a verdict."""
    seen: list[Row] = []
    for params in config.modes:

        def on_round(prompt: BenchPrompt, done: Round, params: SamplingParams = params) -> None:
            seen.extend(nodes_of(prompt, done, params, loaded.eos_ids))

        common.decode_prompts(config, loaded, label, params, on_round)
    return pd.DataFrame(seen, columns=NODE_COLUMNS)


def nodes_of(prompt: BenchPrompt, done: Round, params: SamplingParams, eos_ids: Sequence[int]) -> Iterator[Row]:
    """Yield the nodes of one round whose parent was accepted or is the root, not beyond an accepted end token.

    confidence: probability that the head gave the token after its parent; None for trees without values. accepted:
    probability that the target accepts it then: 1 or 0 greedy, p(token) sampling.
    """
    tree, verdict = done.tree, done.verdict
    if tree is None or verdict is None or done.logits is None:
        return
    parents = [-1]
    for node in verdict.path:
        if tree.tokens[node] in eos_ids:
            break
        parents.append(node)
    named = {"mode": common.mode_name(params), "prompt": prompt.id, "task": prompt.task}
    for parent in parents:
        probs = probabilities(done.logits[parent + 1], params)  # [V]
        for node, token in enumerate(tree.tokens):
            if tree.parents[node] != parent:
                continue
            confidence = None
            if tree.values is not None:
                # A node's value is the log-probability of its path (EAGLE-2, section 4.1).
                confidence = math.exp(tree.values[node] - (tree.values[parent] if parent >= 0 else 0.0))
            yield {**named, "node": node, "confidence": confidence, "accepted": float(probs[token])}


def node_tables(static: pd.DataFrame, dynamic: pd.DataFrame, shape: StaticTree, seed: int) -> list[Table]:
    """Build figures 5 and 6. static: nodes of the static tree `shape`. dynamic: nodes of trees with values."""
    # `0.1` is the second child of the root's best child.
    names: list[str] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        names.append(f"{names[parent]}.{rank}" if parent >= 0 else str(rank))

    positions, tasks, bins, confidence = [], [], [], []
    for (mode, node), group in static.groupby(["mode", "node"]):
        low, high = group.groupby("prompt")["accepted"].mean().quantile([0.25, 0.75])  # over prompts
        place = {"mode": mode, "position": names[node], "depth": shape.depths[node], "reached": len(group)}
        positions.append({**place, "accepted": group["accepted"].mean(), "low": low, "high": high})
    for (node, mode, task), group in static.groupby(["node", "mode", "task"]):
        if len(group) >= MIN_REACHED:
            cell = {"mode": mode, "task": task or "all", "position": names[node]}
            tasks.append({**cell, "accepted": group["accepted"].mean(), "reached": len(group)})
    bin_number = (dynamic["confidence"] * NUM_BINS).astype(int).clip(upper=NUM_BINS - 1)
    for (mode, _), group in dynamic.groupby(["mode", bin_number]):
        low, high = mean_interval(group["accepted"], group["prompt"], seed)
        means = {"confidence": group["confidence"].mean(), "accepted": group["accepted"].mean()}
        bins.append({"mode": mode, "nodes": len(group), **means, "low": low, "high": high})
    for mode, group in dynamic.groupby("mode", sort=False):
        means = {"confidence": group["confidence"].mean(), "accepted": group["accepted"].mean()}
        correlation = group["confidence"].corr(group["accepted"])
        confidence.append({"mode": mode, "nodes": len(group), **means, "correlation": correlation})
    columns = [
        Column("mode", "mode"), Column("nodes", "nodes", ",d"), Column("confidence", "mean confidence", ".3f"),
        Column("accepted", "mean acceptance", ".3f"), Column("correlation", "correlation", ".3f"),
    ]  # fmt: skip
    note = "Nodes of dynamic trees whose parent was accepted; Pearson's correlation of confidence and acceptance."
    return [
        Table("eagle2-acceptance-by-position", rows=json_values(positions)),
        Table("eagle2-acceptance-by-task", rows=json_values(tasks)),
        Table("eagle2-acceptance-by-confidence", rows=json_values(bins)),
        Table("eagle2-confidence", "Confidence and acceptance", columns, json_values(confidence), note),
    ]


def size_table(rows: Iterable[Row]) -> Table:
    """Build the table of tau and speed-up by size."""
    columns = [
        Column("mode", "mode"), Column("method", "method"), Column("tau", "tau", ".2f"),
        Column("speedup", "speed-up", ".2fx"), Column("ci", "95 % CI"),
    ]  # fmt: skip
    shown = [{**common.speed_columns(row), "method": row["method"]} for row in rows]
    return Table("eagle2-sizes", "Trees by nodes and depth", columns, json_values(shown))


if __name__ == "__main__":
    sys.exit(main_of(Eagle2Config, run))
