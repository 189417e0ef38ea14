"""What `draftsmith eval eagle2` found about whole trees, as tables: what value and reranking add, and what nodes and
depth are worth, measured, and replayed at a cost that is fitted to what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from draftsmith.data.console import Column, Row, Table, json_values
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.studies.common import slug, speed_columns, summarised
from draftsmith.eval.studies.fit import LinearCost, least_squares

# EAGLE-2, table 3: speed-up on MT-bench at T=0, Vicuna 7B.
PAPER = {"neither": 2.81, "no value": 3.21, "no reranking": 3.48, "full": 3.62}
COUNTS = ["num_target_calls", "num_draft_tokens", "draft_calls"]  # what costs time


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


def ablation_table(sizes: Sequence[TreeSize], references: Sequence[str], speeds: pd.DataFrame) -> Table:
    """Table 3, at every size; EAGLE's chain and static tree, the references, below it. speeds: rows of benches."""
    named = [(str(size), name, label) for size in sizes for name, label in size.ablations.items()]
    named += [("", label, label) for label in references]
    rows = [
        {**speed_columns(row), "size": size, "variant": name, "paper": PAPER.get(name) if mode == "T=0" else None}
        for mode, own in by_method(speeds)
        for size, name, label in named
        for row in [own.loc[label]]
    ]
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
    return Table("eagle2-ablation", "EAGLE-2: what value and reranking add", columns, json_values(rows), note)


def by_method(speeds: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each mode, by method."""
    for mode, own in speeds.groupby("mode", sort=False):
        yield mode, own.set_index("method")


def size_tables(timed: Sequence[TreeSize], replayed: pd.DataFrame, speeds: pd.DataFrame) -> list[Table]:
    """timed: sizes that were measured. replayed: mode, nodes, depth, size, tau, tokens and counts of every size."""
    measured: list[Row] = []
    predicted: list[Row] = []
    compared: list[Row] = []
    for mode, rows in by_method(speeds):
        runs = rows.loc[[BASELINE, *(size.label for size in timed)]]
        own = replayed[replayed["mode"] == mode].set_index("size", drop=False)
        if can_predict(runs):
            own = own.assign(speedup=predicted_speedups(own, runs, runs))
            predicted += own[["mode", "size", "nodes", "depth", "speedup"]].to_dict("records")
        for size in timed:
            row = runs.loc[size.label]
            said = predicted_speedups(row, runs.drop(size.label), runs) if can_predict(runs) else None
            error = None if said is None else said / row["speedup"] - 1
            known = {**speed_columns(row), "size": str(size)}
            measured.append({**known, "nodes": size.nodes, "depth": f"depth {size.depth}"})
            compared.append({**known, "replayed": own.loc[str(size), "tau"], "predicted": said, "error": error})
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
    return [
        drawn_data("eagle2-tau-by-size", replayed[["mode", "nodes", "depth", "tau"]].to_dict("records")),
        drawn_data("eagle2-speed-by-size", measured),
        drawn_data("eagle2-predicted-speed", predicted),
        Table("eagle2-prediction", "Replay and cost beside measurement", columns, json_values(compared), note),
    ]


def can_predict(runs: pd.DataFrame) -> bool:
    """Whether there are enough for the unknowns of the cost even when one is left out."""
    return len(runs) > len(COUNTS) + 1


def fit_tree_cost(runs: pd.DataFrame) -> LinearCost:
    """Seconds of one target call, of one drafted token (to score it, and to have chosen it) and of one forward of the
    head, for trees of one topk; once more `fixed` for what all runs over the same prompts share, prefills above all.
    The SpecDec++ regression (eq. 2.3) with trees' counts, by relative errors.

    runs: of one bench, `ar` among them, whose drafts count 0.
    """
    return least_squares(runs[COUNTS], runs["tokens"] / runs["tokens_per_s"], fixed=True, relative=True)


def predicted_speedups(counts: Any, fitted: pd.DataFrame, runs: pd.DataFrame) -> Any:
    """Speed-up over the `ar` of `runs` of these counts, a row or rows, by the cost of `fitted`."""
    seconds = fit_tree_cost(fitted).seconds(*(counts[name] for name in COUNTS))
    return counts["tokens"] / seconds / runs.loc[BASELINE, "tokens_per_s"]


def summary_of(tables: Sequence[Table]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    rows = {table.name: table.rows for table in tables}
    ablated = [row for row in rows["eagle2-ablation"] if row["size"]]
    flat = summarised(ablated, ("speedup", "tau"), ("size", "variant", "mode"))
    flat |= summarised(rows["eagle2-confidence"], ("correlation",), ("mode",))
    for mode in dict.fromkeys(row["mode"] for row in rows["eagle2-prediction"]):
        for how, name in (("measured", "eagle2-speed-by-size"), ("predicted", "eagle2-predicted-speed")):
            own = [row for row in rows[name] if row["mode"] == mode]
            if own:
                best = max(own, key=lambda row: row["speedup"])
                flat[f"best_{how}_{slug(mode)}"] = best["size"]
                flat[f"best_{how}_speedup_{slug(mode)}"] = best["speedup"]
    errors = [abs(row["error"]) for row in rows["eagle2-prediction"] if row["error"] is not None]
    return {**flat, "mean_prediction_error": np.mean(errors) if errors else None}
