"""What `draftsmith eval eagle2` found, as tables and charts: pure functions of what was seen and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.bench.summary import BASELINE
from draftsmith.eval.report.figures import Axis, Chart, Column, Row, Table, plain
from draftsmith.eval.studies.common import ci, mean, mode, slug
from draftsmith.eval.studies.eagle2.cost import counts_of, fit_tree_cost, left_out
from draftsmith.eval.studies.eagle2.nodes import Node, by_confidence, by_position, correlation, positions
from draftsmith.modules.decoding.trace import Totals
from draftsmith.modules.decoding.tree import StaticTree

# EAGLE-2, table 3: speed-up on MT-bench at T=0, Vicuna 7B.
PAPER = {"neither": 2.81, "no value": 3.21, "no reranking": 3.48, "full": 3.62}
NUM_BINS = 10
MIN_REACHED = 5  # nodes of a cell: fewer say nothing


@dataclass(frozen=True)
class Size:
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
class Found:
    """One mode. static, dynamic: nodes with a verdict, of the static tree and of a dynamic one. replayed: counts of
    every size. rows: label -> row of the bench's results."""

    temperature: float
    static: list[Node]
    dynamic: list[Node]
    replayed: Mapping[Size, Totals]
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def mode(self) -> str:
        return mode(self.temperature)


def ablation_table(sizes: Sequence[Size], references: Sequence[str], found: Sequence[Found]) -> Table:
    """Table 3, at every size; EAGLE's chain and static tree below it."""
    rows: list[Row] = []
    for one in found:
        for size in sizes:
            for name, label in size.ablations.items():
                paper = PAPER[name] if one.temperature == 0 else None
                rows.append({**speed_row(one, label), "size": str(size), "variant": name, "paper": paper})
        rows += [{**speed_row(one, label), "size": "", "variant": label, "paper": None} for label in references]
    columns = [
        Column("mode", "mode"),
        Column("size", "nodes/ depth/ top-k"),
        Column("variant", "variant"),
        Column("speedup", "speed-up", ".2fx"),
        Column("ci", "95 % CI"),
        Column("tau", "tau", ".2f"),
        Column("paper", "paper (MT-bench)", ".2fx"),
    ]
    note = (
        "Speed-up over autoregressive decoding, all of one mode interleaved on the same prompts; tau counts the bonus "
        "token. No value: candidates are ranked by their own confidence. No reranking: the expanded nodes are kept. "
        "Paper: EAGLE-2, table 3, Vicuna 7B at 60/6/10 on a GPU."
    )
    return Table("eagle2-ablation", "EAGLE-2: what value and reranking add", columns, plain(rows), note)


def speed_row(one: Found, label: str) -> dict[str, Any]:
    row = one.rows[label]
    low, high = row["speedup_ci95"] or (None, None)
    found = {"speedup": row["speedup"], "low": low, "high": high, "ci": ci(row["speedup_ci95"]), "tau": row["tau"]}
    return {"mode": one.mode, **found}


def acceptance_by_position(shape: StaticTree, tree: str, found: Sequence[Found]) -> Chart:
    """Figure 5."""
    rows = [
        plain(
            {
                "mode": one.mode,
                "position": place.name,
                "depth": place.depth,
                "accepted": place.accepted,
                "low": place.low,
                "high": place.high,
                "reached": place.count,
            }
        )
        for one in found
        for place in by_position(one.static, shape)
    ]
    return Chart(
        "eagle2-acceptance-by-position",
        f"Acceptance by position in the static tree ({tree})",
        "point",
        rows,
        x=Axis("position", "position: ranks on the path from the root, 0 the most probable", scale="ordinal"),
        y=Axis("accepted", "accepted, once the parent is", ".0%", zero=True),
        series="mode",
        low="low",
        high="high",
        hover=("depth", "reached"),
        note="Bars span the middle half of the prompts: where they are long, acceptance depends on context, which a "
        "static tree can not follow (figure 5 of the paper).",
    )


def acceptance_by_task(shape: StaticTree, tree: str, found: Sequence[Found]) -> Chart:
    """Figure 5, context by context."""
    rows: list[Row] = []
    for index, name in enumerate(positions(shape)):  # outermost, so that the chart has them in the tree's order
        for one in found:
            at_position = [node for node in one.static if node.index == index]
            for task in sorted({node.task for node in at_position}):
                own = [node.accepted for node in at_position if node.task == task]
                if len(own) >= MIN_REACHED:
                    cell = {"mode": one.mode, "task": task or "all", "position": name, "accepted": mean(own)}
                    rows.append(plain({**cell, "reached": len(own)}))
    return Chart(
        "eagle2-acceptance-by-task",
        f"Acceptance by position and task ({tree})",
        "heatmap",
        rows,
        x=Axis("position", "position", scale="ordinal"),
        y=Axis("task", "task", scale="ordinal"),
        facet="mode",
        color="accepted",
        color_title="accepted, once the parent is",
        color_format=".0%",
        hover=("reached",),
        note="Down a column the position is the same and the context is not. Positions that a task reached fewer than "
        f"{MIN_REACHED} times are left out.",
    )


def acceptance_by_confidence(found: Sequence[Found], seed: int) -> Chart:
    """Figure 6."""
    rows = [
        plain(
            {
                "mode": one.mode,
                "confidence": item.confidence,
                "accepted": item.accepted,
                "low": item.low,
                "high": item.high,
                "nodes": item.count,
            }
        )
        for one in found
        for item in by_confidence(one.dynamic, NUM_BINS, seed)
    ]
    return Chart(
        "eagle2-acceptance-by-confidence",
        "Acceptance against the head's confidence",
        "point",
        rows,
        x=Axis("confidence", "confidence: the head's probability of the token", ".1f"),
        y=Axis("accepted", "accepted, once the parent is", ".0%"),
        series="mode",
        low="low",
        high="high",
        size="nodes",
        diagonal=True,
        note="On the diagonal confidence is acceptance, which EAGLE-2 builds its trees on (figure 6 of the paper).",
    )


def confidence_table(found: Sequence[Found]) -> Table:
    rows = []
    for one in found:
        sure = mean([node.confidence or 0.0 for node in one.dynamic])
        accepted = mean([node.accepted for node in one.dynamic])
        rows.append(
            plain(
                {
                    "mode": one.mode,
                    "nodes": len(one.dynamic),
                    "confidence": sure,
                    "accepted": accepted,
                    "correlation": correlation(one.dynamic),
                }
            )
        )
    columns = [
        Column("mode", "mode"),
        Column("nodes", "nodes", ",d"),
        Column("confidence", "mean confidence", ".3f"),
        Column("accepted", "mean acceptance", ".3f"),
        Column("correlation", "correlation", ".3f"),
    ]
    note = "Nodes of dynamic trees whose parent was accepted; Pearson's correlation of confidence and acceptance."
    return Table("eagle2-confidence", "Does confidence say what is accepted?", columns, rows, note)


def tau_by_size(found: Sequence[Found]) -> Chart:
    rows = [
        plain({"mode": one.mode, "nodes": size.nodes, "depth": size.depth, "tau": totals.tau})
        for one in found
        for size, totals in one.replayed.items()
    ]
    return size_map(
        "eagle2-tau-by-size",
        "Tokens per target call by nodes and depth",
        rows,
        ("tau", "tau", ".2f"),
        "From one recording of the largest trees: every size's rounds are read off it, without decoding again.",
    )


def size_map(name: str, title: str, rows: Sequence[Row], color: tuple[str, str, str], note: str) -> Chart:
    """Cells of nodes and depth; color: key, title and format."""
    return Chart(
        name,
        title,
        "heatmap",
        rows,
        x=Axis("nodes", "nodes that the target scores", scale="ordinal"),
        y=Axis("depth", "depth", scale="ordinal"),
        facet="mode",
        color=color[0],
        color_title=color[1],
        color_format=color[2],
        note=note,
    )


def measured_speed(sizes: Sequence[Size], found: Sequence[Found]) -> Chart:
    rows = [
        plain({**speed_row(one, size.label), "nodes": size.nodes, "depth": f"depth {size.depth}"})
        for one in found
        for size in sizes
    ]
    return Chart(
        "eagle2-speed-by-size",
        "Measured speed-up by nodes and depth",
        "line",
        rows,
        x=Axis("nodes", "nodes that the target scores", scale="log"),
        y=Axis("speedup", "speed-up over autoregressive decoding", ".2f"),
        series="depth",
        facet="mode",
        low="low",
        high="high",
        hover=("tau",),
        note="More nodes accept more and cost more: the best number is where the target still scores another "
        "row for little.",
    )


def cost_rows(sizes: Sequence[Size], one: Found) -> list[Mapping[str, Any]]:
    return [one.rows[label] for label in (BASELINE, *(size.label for size in sizes))]


def predictions(sizes: Sequence[Size], one: Found) -> dict[Size, float]:
    """Speed-up of every replayed size by the cost fitted to the measured ones; empty where they are too few."""
    rows = cost_rows(sizes, one)
    if len(rows) < 5:
        return {}
    cost, rate = fit_tree_cost(rows), one.rows[BASELINE]["tokens_per_s"]
    return {size: totals.num_tokens / cost.seconds(*counts_of(totals)) / rate for size, totals in one.replayed.items()}


def predicted_speed(sizes: Sequence[Size], found: Sequence[Found]) -> Chart:
    rows = [
        plain({"mode": one.mode, "nodes": size.nodes, "depth": size.depth, "speedup": speedup})
        for one in found
        for size, speedup in predictions(sizes, one).items()
    ]
    return size_map(
        "eagle2-predicted-speed",
        "Predicted speed-up by nodes and depth",
        rows,
        ("speedup", "speed-up", ".2f"),
        "Replayed counts, priced by a regression over the measured sizes (seconds a target call, a drafted token, a "
        "forward of the head); the table says how far it is off where it was not fitted.",
    )


def prediction_table(sizes: Sequence[Size], found: Sequence[Found]) -> Table:
    """What replay and cost say beside what was measured."""
    rows = []
    for one in found:
        outside = left_out(cost_rows(sizes, one))[1:]
        for size, seconds in zip(sizes, outside, strict=True):
            row = one.rows[size.label]
            rate = one.rows[BASELINE]["tokens_per_s"]
            predicted = row["tokens"] / seconds / rate if seconds else None
            rows.append(
                plain(
                    {
                        "mode": one.mode,
                        "size": str(size),
                        "tau": row["tau"],
                        "replayed": one.replayed[size].tau,
                        "speedup": row["speedup"],
                        "predicted": predicted,
                        "error": predicted / row["speedup"] - 1 if predicted else None,
                    }
                )
            )
    columns = [
        Column("mode", "mode"),
        Column("size", "nodes/ depth/ top-k"),
        Column("tau", "tau", ".2f"),
        Column("replayed", "replayed", ".2f"),
        Column("speedup", "speed-up", ".2fx"),
        Column("predicted", "predicted", ".2fx"),
        Column("error", "error", "+.1%"),
    ]
    note = (
        "Replayed: tau read off the recording. The nodes of a tree are chosen, not drawn, so that answers, and with "
        "them all counts, are those of autoregressive decoding with the same seed. Predicted: speed-up by a cost "
        "fitted to all the other sizes of the table."
    )
    return Table("eagle2-prediction", "Replay and cost beside measurement", columns, rows, note)


def summary_of(ablated: Sequence[Size], timed: Sequence[Size], found: Sequence[Found]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    flat: dict[str, Any] = {}
    for one in found:
        for size in ablated:
            for name, label in size.ablations.items():
                for key in ("speedup", "tau"):
                    flat[f"{key}_{slug(str(size), name, one.mode)}"] = one.rows[label][key]
        flat[f"correlation_{slug(one.mode)}"] = correlation(one.dynamic)
        speeds = {"measured": {size: one.rows[size.label]["speedup"] for size in timed}}
        speeds["predicted"] = predictions(timed, one)
        for how, speedups in speeds.items():
            if speedups:
                best, speedup = max(speedups.items(), key=lambda item: item[1])
                flat[f"best_{how}_{slug(one.mode)}"] = str(best)
                flat[f"best_{how}_speedup_{slug(one.mode)}"] = speedup
    errors = [abs(row["error"]) for row in prediction_table(timed, found).rows if row["error"] is not None]
    flat["mean_prediction_error"] = float(np.mean(errors)) if errors else None
    return flat
