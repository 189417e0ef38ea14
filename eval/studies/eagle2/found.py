"""What `draftsmith eval eagle2` found, as tables: pure functions of what was seen and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.report.tables import Column, Row, Table, drawn_data, interval, plain
from draftsmith.eval.studies.common import mean, mode, slug
from draftsmith.eval.studies.eagle2.cost import counts_of, fit_tree_cost, predicted_by_others
from draftsmith.eval.studies.eagle2.nodes import Node, by_confidence, by_position, correlation, node_names
from draftsmith.modules.decoding.trace import Totals
from draftsmith.modules.decoding.tree import StaticTree

# EAGLE-2, table 3: speed-up on MT-bench at T=0, Vicuna 7B.
PAPER = {"neither": 2.81, "no value": 3.21, "no reranking": 3.48, "full": 3.62}
NUM_BINS = 10
MIN_REACHED = 5  # nodes of a cell: fewer say nothing


@dataclass(frozen=True)
class TreeSize:
    """Settings of a dynamic tree."""

    nodes: int
    depth: int
    topk: int

    @property
    def label(self) -> str:
        return f"eagle2:nodes={self.nodes}:depth={self.depth}:topk={self.topk}"

    @property
    def ablations(self) -> dict[str, str]:
        """Name in table 3 -> method."""
        return {
            "neither": f"{self.label}:value=off:rerank=off",
            "no value": f"{self.label}:value=off",
            "no reranking": f"{self.label}:rerank=off",
            "full": self.label,
        }

    def __str__(self) -> str:
        return f"{self.nodes}/{self.depth}/{self.topk}"


@dataclass(frozen=True)
class ModeResults:
    """Results at one temperature.

    static, dynamic: nodes with a verdict, of the static tree and of a dynamic one. replayed: counts of every size.
    rows: label -> row of the bench's results.
    """

    temperature: float
    static: list[Node]
    dynamic: list[Node]
    replayed: Mapping[TreeSize, Totals]
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def mode(self) -> str:
        return mode(self.temperature)

    def speed(self, label: str) -> dict[str, Any]:
        """Columns of one measured method."""
        row = self.rows[label]
        low, high = row["speedup_ci95"] or (None, None)
        found = {"speedup": row["speedup"], "low": low, "high": high, "ci": interval(row["speedup_ci95"])}
        return {"mode": self.mode, **found, "tau": row["tau"]}


def tables_of(
    ablated: Sequence[TreeSize],
    references: Sequence[str],
    timed: Sequence[TreeSize],
    shape: StaticTree,
    found: Sequence[ModeResults],
    seed: int,
) -> list[Table]:
    """ablated, timed: sizes. references: methods beside them. shape: of the static tree that was looked at."""
    tau = [
        {"mode": one.mode, "nodes": size.nodes, "depth": size.depth, "tau": totals.tau}
        for one in found
        for size, totals in one.replayed.items()
    ]
    speed = [
        {**one.speed(size.label), "nodes": size.nodes, "depth": f"depth {size.depth}"}
        for one in found
        for size in timed
    ]
    predicted = [
        {"mode": one.mode, "nodes": size.nodes, "depth": size.depth, "speedup": speedup}
        for one in found
        for size, speedup in predicted_speedups(timed, one).items()
    ]
    return [
        ablation_table(ablated, references, found),
        drawn_data("eagle2-acceptance-by-position", position_rows(shape, found)),
        drawn_data("eagle2-acceptance-by-task", task_rows(shape, found)),
        drawn_data("eagle2-acceptance-by-confidence", confidence_rows(found, seed)),
        confidence_table(found),
        drawn_data("eagle2-tau-by-size", tau),
        drawn_data("eagle2-speed-by-size", speed),
        drawn_data("eagle2-predicted-speed", predicted),
        prediction_table(timed, found),
    ]


def ablation_table(sizes: Sequence[TreeSize], references: Sequence[str], found: Sequence[ModeResults]) -> Table:
    """Table 3, at every size; EAGLE's chain and static tree below it."""
    rows: list[Row] = []
    for one in found:
        for size in sizes:
            for name, label in size.ablations.items():
                paper = PAPER[name] if one.temperature == 0 else None
                rows.append({**one.speed(label), "size": str(size), "variant": name, "paper": paper})
        rows += [{**one.speed(label), "size": "", "variant": label, "paper": None} for label in references]
    columns = [
        Column("mode", "mode"), Column("size", "nodes/ depth/ top-k"), Column("variant", "variant"),
        Column("speedup", "speed-up", ".2fx"), Column("ci", "95 % CI"), Column("tau", "tau", ".2f"),
        Column("paper", "paper (MT-bench)", ".2fx"),
    ]  # fmt: skip
    note = (
        "Speed-up over autoregressive decoding, all of one mode interleaved on the same prompts; tau counts the bonus "
        "token. No value: candidates are ranked by their own confidence. No reranking: the expanded nodes are kept. "
        "Paper: EAGLE-2, table 3, Vicuna 7B at 60/6/10 on a GPU."
    )
    return Table("eagle2-ablation", "EAGLE-2: what value and reranking add", columns, plain(rows), note)


def position_rows(shape: StaticTree, found: Sequence[ModeResults]) -> list[Row]:
    """Figure 5."""
    rows: list[Row] = []
    for one in found:
        for place in by_position(one.static, shape):
            row = asdict(place)
            rows.append({"mode": one.mode, "position": row.pop("name"), "reached": row.pop("count"), **row})
    return rows


def task_rows(shape: StaticTree, found: Sequence[ModeResults]) -> list[Row]:
    """Figure 5, context by context; cells that were reached too seldom are left out."""
    rows: list[Row] = []
    for index, name in enumerate(node_names(shape)):  # outermost, so that the chart has them in the tree's order
        for one in found:
            at_position = [node for node in one.static if node.index == index]
            for task in sorted({node.task for node in at_position}):
                own = [node.accepted for node in at_position if node.task == task]
                if len(own) >= MIN_REACHED:
                    cell = {"mode": one.mode, "task": task or "all", "position": name, "accepted": mean(own)}
                    rows.append({**cell, "reached": len(own)})
    return rows


def confidence_rows(found: Sequence[ModeResults], seed: int) -> list[Row]:
    """Figure 6."""
    rows: list[Row] = []
    for one in found:
        for item in by_confidence(one.dynamic, NUM_BINS, seed):
            row = asdict(item)
            rows.append({"mode": one.mode, "nodes": row.pop("count"), **row})
    return rows


def confidence_table(found: Sequence[ModeResults]) -> Table:
    rows = [
        {
            "mode": one.mode,
            "nodes": len(one.dynamic),
            "confidence": mean([node.confidence or 0.0 for node in one.dynamic]),
            "accepted": mean([node.accepted for node in one.dynamic]),
            "correlation": correlation(one.dynamic),
        }
        for one in found
    ]
    columns = [
        Column("mode", "mode"), Column("nodes", "nodes", ",d"), Column("confidence", "mean confidence", ".3f"),
        Column("accepted", "mean acceptance", ".3f"), Column("correlation", "correlation", ".3f"),
    ]  # fmt: skip
    note = "Nodes of dynamic trees whose parent was accepted; Pearson's correlation of confidence and acceptance."
    return Table("eagle2-confidence", "Does confidence say what is accepted?", columns, plain(rows), note)


def cost_rows(sizes: Sequence[TreeSize], one: ModeResults) -> list[Mapping[str, Any]]:
    return [one.rows[label] for label in (BASELINE, *(size.label for size in sizes))]


def predicted_speedups(sizes: Sequence[TreeSize], one: ModeResults) -> dict[TreeSize, float]:
    """Speed-up of every replayed size by the cost fitted to the measured ones; empty where they are too few."""
    rows = cost_rows(sizes, one)
    if len(rows) < 5:
        return {}
    cost, rate = fit_tree_cost(rows), one.rows[BASELINE]["tokens_per_s"]
    return {size: totals.num_tokens / cost.seconds(*counts_of(totals)) / rate for size, totals in one.replayed.items()}


def prediction_table(sizes: Sequence[TreeSize], found: Sequence[ModeResults]) -> Table:
    """Replay and cost beside what was measured."""
    rows = []
    for one in found:
        rate = one.rows[BASELINE]["tokens_per_s"]
        for size, seconds in zip(sizes, predicted_by_others(cost_rows(sizes, one))[1:], strict=True):
            row = one.rows[size.label]
            predicted = row["tokens"] / seconds / rate if seconds else None
            error = predicted / row["speedup"] - 1 if predicted else None
            found_row = {"mode": one.mode, "size": str(size), "tau": row["tau"], "replayed": one.replayed[size].tau}
            rows.append({**found_row, "speedup": row["speedup"], "predicted": predicted, "error": error})
    columns = [
        Column("mode", "mode"), Column("size", "nodes/ depth/ top-k"), Column("tau", "tau", ".2f"),
        Column("replayed", "replayed", ".2f"), Column("speedup", "speed-up", ".2fx"),
        Column("predicted", "predicted", ".2fx"), Column("error", "error", "+.1%"),
    ]  # fmt: skip
    note = (
        "Replayed: tau read off the recording. The nodes of a tree are chosen, not drawn, so that answers, and with "
        "them all counts, are those of autoregressive decoding with the same seed. Predicted: speed-up by a cost "
        "fitted to all the other sizes of the table."
    )
    return Table("eagle2-prediction", "Replay and cost beside measurement", columns, plain(rows), note)


def summary_of(ablated: Sequence[TreeSize], timed: Sequence[TreeSize], found: Sequence[ModeResults]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    flat: dict[str, Any] = {}
    for one in found:
        for size in ablated:
            for name, label in size.ablations.items():
                for key in ("speedup", "tau"):
                    flat[f"{key}_{slug(str(size), name, one.mode)}"] = one.rows[label][key]
        flat[f"correlation_{slug(one.mode)}"] = correlation(one.dynamic)
        speeds = {"measured": {size: one.rows[size.label]["speedup"] for size in timed}}
        speeds["predicted"] = predicted_speedups(timed, one)
        for how, speedups in speeds.items():
            if speedups:
                best, speedup = max(speedups.items(), key=lambda item: item[1])
                flat[f"best_{how}_{slug(one.mode)}"] = str(best)
                flat[f"best_{how}_speedup_{slug(one.mode)}"] = speedup
    errors = [abs(row["error"]) for row in prediction_table(timed, found).rows if row["error"] is not None]
    flat["mean_prediction_error"] = float(np.mean(errors)) if errors else None
    return flat
