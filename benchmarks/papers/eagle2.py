"""Repeat the experiments of EAGLE-2 (Li et al. 2024) with an EAGLE head.

    draftsmith run demo
    python benchmarks/papers/eagle2.py --draft runs/demo/quick/eagle-head/best --output runs/eagle2

Acceptance by position in a static tree (figure 5) and by confidence (figure 6), and the speed-up by nodes and depth:
measured for some sizes, and predicted for all of them from replayed counts at costs that are fitted to the measured
ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from draftsmith.benchmarks.papers import common
from draftsmith.benchmarks.papers.common import Row, mean_interval
from draftsmith.benchmarks.papers.replay import replay_tree
from draftsmith.benchmarks.papers.rollouts import Recording, TreeRecorder, record_all
from draftsmith.data.console import Column, Table, json_values
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.bench.runner import read_tree
from draftsmith.eval.tables import drawn_data
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.methods import DynamicTreeMethod
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import InputError, SamplingParams, check_range

COUNTS = ["num_target_calls", "num_draft_tokens", "draft_calls"]  # the counts that cost time
NODE_COLUMNS = ["mode", "prompt", "task", "node", "confidence", "accepted"]
NUM_BINS = 10
MIN_REACHED = 5  # nodes of a cell: fewer say nothing


@dataclass(frozen=True)
class TreeSize:
    """Size of a dynamic tree."""

    nodes: int
    depth: int
    topk: int

    @property
    def label(self) -> str:
        return f"eagle-tree:nodes={self.nodes}:depth={self.depth}:topk={self.topk}"

    def __str__(self) -> str:
        return f"{self.nodes}/{self.depth}/{self.topk}"


@dataclass(frozen=True, kw_only=True)
class Eagle2Config(common.PaperConfig):
    """Repeats the experiments of EAGLE-2 with an EAGLE head that was trained for the target.

    Attributes:
        draft: Directory of the EAGLE head.
        tree: Static tree whose positions are shown: a shipped name, or a YAML list of paths of ranks.
        topk: Children per node, and nodes expanded at once.
        nodes: Numbers of nodes to replay, separated by commas.
        depths: Depths to replay.
        measured_nodes: Those of `nodes` to measure, each with every one of `measured_depths`. The largest size shows
            confidence.
        measured_depths: Those of `depths` to measure.
    """

    tree: str = "eagle-1"
    topk: int = 10
    nodes: str = "2,4,6,8,12,16,24,32,48,60"
    depths: str = "1,2,3,4,5,6,8"
    measured_nodes: str = "4,8,16,32,60"
    measured_depths: str = "2,4,6"

    def sizes(self, nodes: str, depths: str) -> list[TreeSize]:
        """Return every combination of two settings that hold numbers."""
        counts, levels = (comma_numbers(name, getattr(self, name), int) for name in (nodes, depths))
        return [TreeSize(count, depth, self.topk) for depth in levels for count in counts]


@sole_writer()
def run(config: Eagle2Config) -> Path:
    """Decode, replay and measure; write OUTPUT/results.json."""
    if "eagle" not in config.drafters:
        given = ", ".join(config.drafters.values()) or "nothing"
        raise InputError("draft", given, "an EAGLE head", "Pass --draft: a head of `draftsmith train eagle`.")
    check_range("topk", config.topk, 1)
    replayed, timed = config.sizes("nodes", "depths"), config.sizes("measured_nodes", "measured_depths")
    if missing := [size for size in timed if size not in replayed]:
        expected = "nodes and depths that are also replayed"
        raise InputError("measured_nodes", missing[0].label, expected, "Add them to --nodes and --depths.")
    static, largest = f"eagle-static:tree={config.tree}", max(timed, key=lambda size: size.nodes * size.depth).label
    labels = [size.label for size in timed]
    loaded = common.load(config, [*labels, static, *(size.label for size in replayed)])

    nodes = {label: watch_nodes(config, loaded, label) for label in (static, largest)}
    counts = pd.DataFrame([row for params in config.modes for row in replay_sizes(config, loaded, replayed, params)])
    speeds = pd.DataFrame(
        {"mode": common.mode_name(params), **row}
        for params in config.modes
        for row in common.measure(config, labels, params).values()
    )
    tables = [
        *node_tables(nodes[static], nodes[largest], read_tree(config.tree), config.seed),
        *size_tables(timed, counts, speeds),
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


def replay_sizes(
    config: Eagle2Config, loaded: common.Loaded, sizes: Sequence[TreeSize], params: SamplingParams
) -> Iterator[Row]:
    """Yield the counts of every size, replayed from one recording of the largest trees."""
    depth = max(size.depth for size in sizes)
    how = Recording(params, depth, config.max_new_tokens, config.seed, loaded.eos_ids)
    method = DynamicTreeMethod(nodes=1, topk=config.topk, drafter="eagle")
    rollouts = record_all(TreeRecorder(loaded.models, method, how), loaded.prompts)
    for size in sizes:
        totals = pool(replay_tree(rollouts, size.nodes, size.depth))
        row = {"mode": common.mode_name(params), "size": str(size), "nodes": size.nodes, "depth": size.depth}
        yield row | {"tau": totals.tau, "tokens": totals.num_tokens} | {name: getattr(totals, name) for name in COUNTS}


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
        drawn_data("eagle2-acceptance-by-position", positions),
        drawn_data("eagle2-acceptance-by-task", tasks),
        drawn_data("eagle2-acceptance-by-confidence", bins),
        Table("eagle2-confidence", "Confidence and acceptance", columns, json_values(confidence), note),
    ]


def size_tables(timed: Sequence[TreeSize], replayed: pd.DataFrame, speeds: pd.DataFrame) -> list[Table]:
    """Compare measured speed-ups of some sizes with predictions, and predict those of all sizes."""
    measured, predicted, compared = list[Row](), list[Row](), list[Row]()
    for mode, of_mode in speeds.groupby("mode", sort=False):
        runs = of_mode.set_index("method").loc[[BASELINE, *(size.label for size in timed)]]
        counts = replayed[replayed["mode"] == mode].set_index("size", drop=False)
        enough = len(runs) > len(COUNTS) + 1  # for the unknowns of the cost when one run is left out
        if enough:
            counts = counts.assign(speedup=predict_speedup(counts, runs, runs))
            predicted += counts[["mode", "size", "nodes", "depth", "speedup"]].to_dict("records")
        for size in timed:
            row = runs.loc[size.label]
            guess = predict_speedup(row, runs.drop(size.label), runs) if enough else None
            error = None if guess is None else guess / row["speedup"] - 1
            speed = {**common.speed_columns(row), "size": str(size)}
            measured.append({**speed, "nodes": size.nodes, "depth": f"depth {size.depth}"})
            compared.append({**speed, "replayed": counts.loc[str(size), "tau"], "predicted": guess, "error": error})
    columns = [
        Column("mode", "mode"), Column("size", "nodes/ depth/ top-k"), Column("tau", "tau", ".2f"),
        Column("replayed", "replayed", ".2f"), Column("speedup", "speed-up", ".2fx"),
        Column("predicted", "predicted", ".2fx"), Column("error", "error", "+.1%"),
    ]  # fmt: skip
    note = (
        "Replayed: tau from one recording. Nodes are chosen, not drawn: responses and counts are those of "
        "autoregressive decoding with the same seed. Predicted: cost fitted to all other sizes of the table."
    )
    return [
        drawn_data("eagle2-tau-by-size", replayed[["mode", "nodes", "depth", "tau"]].to_dict("records")),
        drawn_data("eagle2-speed-by-size", measured),
        drawn_data("eagle2-predicted-speed", predicted),
        Table("eagle2-prediction", "Replayed and measured sizes", columns, json_values(compared), note),
    ]


def predict_speedup(counts: Any, fitted: pd.DataFrame, runs: pd.DataFrame) -> Any:
    """Return the speed-up of these counts, a row or rows, over the `ar` of `runs`, by the cost of `fitted`.

    The cost is the regression of SpecDec++ (eq. 2.3) with the counts of trees: seconds of a target call, of a drafted
    token and of a forward of the head, and a constant for what all runs share, prefills above all. Relative errors are
    the least.
    """
    seconds = (fitted["tokens"] / fitted["tokens_per_s"]).to_numpy(float)
    x = np.column_stack([fitted[COUNTS].to_numpy(float), np.ones(len(fitted))])
    weights = np.linalg.lstsq(x / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    total = weights[-1] + sum(weight * counts[name] for weight, name in zip(weights, COUNTS, strict=False))
    return counts["tokens"] / total / runs.loc[BASELINE, "tokens_per_s"]


if __name__ == "__main__":
    sys.exit(main_of(Eagle2Config, run))
