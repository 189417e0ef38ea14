"""What `draftsmith eval hsddw` found, as tables: functions of frames of what was watched and measured.

watched: a row a method at the common window, what was drafted and by whom. verified, windows: the rows of
`Watcher`, with mode and method; windows also have `length`, the tokens of their answer. speeds: rows of benches
with mode, method and window k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from draftsmith.data.console import Column, Row, Table, json_values
from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.studies.common import speed_columns, summarised
from draftsmith.modules.metrics import soft_label_auc

# HSDDW, table 2: speed-up on MT-Bench at T=1.
PAPER = {"SD": 2.40, "pre-verify": 2.53, "self-verify": 2.63, "pre+self-verify": 2.69, "HSDDW": 2.95}
# Methods of fixed windows, where no rule chose the tokens by their entropy; the only ones whose verdicts are counted.
FIXED = ("SD", "pre-verify")
DYNAMIC = ("self-verify", "HSDDW")  # methods whose windows entropy ends
ENTROPY_STEP, ENTROPY_END = 0.25, 6.0  # nats; the last bin holds everything above
NUM_TENTHS = 10


def ablation_table(k: int, speeds: pd.DataFrame) -> Table:
    """Table 2: each method at the same window, and at the best of those measured."""
    rows = []
    for (mode, method), own in speeds.groupby(["mode", "method"], sort=False):
        best = own.loc[own["speedup"].idxmax()]
        found = {"method": method, **speed_columns(own[own["k"] == k].iloc[0]), "best_k": best["k"]}
        lost = 1 - own["speedup"].min() / best["speedup"]
        paper = PAPER.get(method) if mode == "T=1" else None
        rows.append({**found, "best": best["speedup"], "lost": lost, "paper": paper})
    columns = [
        Column("mode", "mode"), Column("method", "method"), Column("speedup", f"speed-up, k={k}", ".2fx"),
        Column("ci", "95 % CI"), Column("tau", "tau", ".2f"), Column("best_k", "best k", "d"),
        Column("best", "at it", ".2fx"), Column("lost", "worst k loses", ".0%"), Column("paper", "paper", ".2fx"),
    ]  # fmt: skip
    note = (
        "Speed-up over autoregressive decoding, methods of one mode interleaved on the same prompts; tau counts the "
        "bonus token. The methods whose draft is M2 were measured in a run of their own. The best k is chosen on these "
        "prompts. Paper: HSDDW, table 2, other models and a GPU; HSDDW's own MT-Bench, HumanEval, GSM8K and Alpaca at "
        "T=1 are 2.91x, 2.92x, 2.64x and 2.99x."
    )
    return Table("hsddw-ablation", "HSDDW: what each part adds", columns, json_values(rows), note)


def speed_tables(k: int, speeds: pd.DataFrame) -> list[Table]:
    """Table 2 and figure 7."""
    taus = speeds[["mode", "method", "k", "tau"]].to_dict("records")
    keys = ("method", "k", "tokens_per_s")
    gains = [{**speed_columns(row), **{key: row[key] for key in keys}} for row in speeds.to_dict("records")]
    return [
        ablation_table(k, speeds),
        drawn_data("hsddw-window-sensitivity", gains),
        drawn_data("hsddw-tau-by-window", taus),
    ]


def entropy_tables(verified: pd.DataFrame) -> list[Table]:
    """Figure 6 and its means, and what entropy is worth as a predictor: of methods whose windows are fixed."""
    fixed = verified[verified["method"].isin(FIXED)]
    rows = []
    densities: list[Row] = []
    for (mode, by), own in fixed.groupby(["mode", "by"], sort=False):
        accepted, rejected = (own["entropy"][own["accepted"] == verdict] for verdict in (True, False))
        counts = {"accepted": len(accepted), "rejected": len(rejected)}
        means = {"mean_accepted": accepted.mean(), "mean_rejected": rejected.mean()}
        label = torch.tensor([not verdict for verdict in own["accepted"]], dtype=torch.float64)
        auc = soft_label_auc(torch.tensor(own["entropy"].to_list(), dtype=torch.float64), label)
        rows.append({"mode": mode, "by": by, **counts, **means, "auc": float(auc)})
        for verdict, values in (("accepted", accepted), ("rejected", rejected)):
            densities += density({"panel": f"{by}, {mode}", "verdict": verdict}, values)
    columns = [
        Column("mode", "mode"), Column("by", "drafted, verified"), Column("accepted", "accepted", ",d"),
        Column("rejected", "rejected", ",d"), Column("mean_accepted", "mean entropy, accepted", ".2f"),
        Column("mean_rejected", "rejected", ".2f"), Column("auc", "AUC", ".3f"),
    ]  # fmt: skip
    note = (
        "Nats, of the distribution that a token was drawn from (greedy: the softmax at temperature 1); tokens down to "
        "the first rejected one of every draft, windows fixed. AUC: how often a rejected token's entropy is the higher "
        "of two."
    )
    return [
        Table("hsddw-entropy", "Entropy of accepted and rejected tokens", columns, json_values(rows), note),
        drawn_data("hsddw-entropy-density", densities),
    ]


def density(said: Row, entropies: pd.Series) -> Iterator[Row]:
    """Shares of the entropies by bins of ENTROPY_STEP."""
    edges = np.arange(0, ENTROPY_END + ENTROPY_STEP, ENTROPY_STEP)
    counts, _ = np.histogram(entropies.clip(upper=ENTROPY_END), edges)
    for low, count in zip(edges, counts, strict=False):
        share = count / max(len(entropies), 1)
        yield {**said, "entropy": low + ENTROPY_STEP / 2, "share": share, "tokens": count}


def redundancy_table(k: int, watched: Sequence[Row]) -> Table:
    """Table 4."""
    columns = [
        Column("mode", "mode"), Column("method", f"method, k={k}"), Column("drafted", "drafted", ",d"),
        Column("accepted", "accepted", ",d"), Column("redundancy", "sigma", ".0%"),
        Column("inner", "sigma of M1 at M2", ".0%"), Column("utilisation", "eta", ".0%"),
        Column("M1", "from M1", ".0%"), Column("M2", "from M2", ".0%"), Column("target", "from the target", ".0%"),
    ]  # fmt: skip
    note = (
        "Sigma: 1 - accepted / drafted, of what the target was handed; at M2, of what M1 drafted for it. Eta, the "
        "target's utilisation: its inferences by the length of the output, less is better. From: who made the tokens "
        "of the answers; those of the target are corrections and bonus tokens."
    )
    return Table("hsddw-redundancy", "What is drafted in vain", columns, json_values(watched), note)


def window_tables(windows: pd.DataFrame, examples: int, seed: int) -> list[Table]:
    """Figure 8: windows of so many single answers, the longest of the first method; and means over all answers."""
    dynamic = windows[windows["method"].isin(DYNAMIC)]
    first = dynamic.groupby(["mode", "method"], sort=False).ngroup() == 0
    lengths = dynamic[first].groupby("prompt", sort=False)["length"].first()
    longest = lengths.sort_values(ascending=False, kind="stable").index[:examples]
    columns = ["method", "round", "start", "drafted", "accepted", "threshold"]
    shown = [
        {"panel": f"{prompt}, {mode}", **row}
        for (mode, _), own in dynamic.groupby(["mode", "method"], sort=False)
        for prompt in longest
        for row in own.loc[own["prompt"] == prompt, columns].to_dict("records")
    ]
    return [
        drawn_data("hsddw-windows", shown),
        drawn_data("hsddw-window-by-position", tenths(dynamic, "drafted", seed)),
        drawn_data("hsddw-threshold-by-position", tenths(dynamic, "threshold", seed)),
    ]


def tenths(windows: pd.DataFrame, of: str, seed: int) -> Iterator[Row]:
    """Means of a column by tenths of the answers, 95 % intervals over prompts."""
    place = (NUM_TENTHS * windows["start"] // windows["length"]).clip(upper=NUM_TENTHS - 1)
    for (mode, method), own in windows.groupby(["mode", "method"], sort=False):
        for tenth, part in own.groupby(place):
            low, high = mean_interval(part[of], part["prompt"], seed)
            found = {of: part[of].mean(), "low": low, "high": high, "rounds": len(part)}
            yield {"mode": mode, "method": method, "position": (tenth + 0.5) / NUM_TENTHS, **found}


def summary_of(tables: Sequence[Table]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    rows = {table.name: table.rows for table in tables}
    entropies = summarised(rows["hsddw-entropy"], ("mean_accepted", "mean_rejected", "auc"), ("by", "mode"))
    return {
        **summarised(rows["hsddw-ablation"], ("speedup", "tau", "best", "best_k"), ("method", "mode")),
        **{f"entropy_{key}": value for key, value in entropies.items()},
        **summarised(rows["hsddw-redundancy"], ("redundancy", "utilisation"), ("method", "mode")),
    }
