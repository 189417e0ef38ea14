"""What `draftsmith eval hsddw` found, as tables: pure functions of what was watched and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.report.tables import Column, Row, Table, drawn_data, interval, plain
from draftsmith.eval.studies.common import mean, mode, slug
from draftsmith.eval.studies.hsddw.watch import Observations
from draftsmith.modules.decoding.trace import Totals, pool
from draftsmith.modules.metrics import soft_label_auc

# HSDDW, table 2: speed-up on MT-Bench at T=1.
PAPER = {"SD": 2.40, "pre-verify": 2.53, "self-verify": 2.63, "pre+self-verify": 2.69, "HSDDW": 2.95}
# Methods of fixed windows, where no rule chose the tokens by their entropy -> whose verdicts are taken from them.
ENTROPY_FROM = {"SD": ("M1 by target",), "pre-verify": ("M1 by M2", "M2 by target")}
DYNAMIC = ("self-verify", "HSDDW")  # methods whose windows entropy ends
ENTROPY_STEP, ENTROPY_END = 0.25, 6.0  # nats; the last bin holds everything above
NUM_TENTHS = 10


@dataclass(frozen=True)
class WindowSpeed:
    """One measured method. name: in tables; k: its window; row: of the bench's results."""

    temperature: float
    name: str
    k: int
    row: dict[str, Any]


@dataclass(frozen=True)
class WatchedMethod:
    """One method watched at one window: what was seen, what it cost, and tokens of every answer by the prompt's id."""

    temperature: float
    name: str
    seen: Observations
    totals: Totals
    lengths: dict[str, int]


def tables_of(
    k: int, examples: int, watched: Sequence[WatchedMethod], speeds: Sequence[WindowSpeed], seed: int
) -> list[Table]:
    """k: the window that methods were watched at. examples: answers whose windows are shown one by one."""
    dynamic = [item for item in watched if item.name in DYNAMIC]
    return [
        ablation_table(k, speeds),
        drawn_data("hsddw-window-sensitivity", [window_speed(item) for item in speeds]),
        drawn_data("hsddw-tau-by-window", [{**named(item), "k": item.k, "tau": item.row["tau"]} for item in speeds]),
        entropy_table(watched),
        drawn_data("hsddw-entropy-density", density_rows(watched)),
        redundancy_table(k, watched),
        drawn_data("hsddw-windows", window_rows(dynamic, examples)),
        drawn_data("hsddw-window-by-position", tenths(dynamic, "drafted", seed)),
        drawn_data("hsddw-threshold-by-position", tenths(dynamic, "threshold", seed)),
    ]


def named(item: WatchedMethod | WindowSpeed) -> dict[str, Any]:
    """Mode and method of a row."""
    return {"mode": mode(item.temperature), "method": item.name}


def ablation_table(k: int, speeds: Sequence[WindowSpeed]) -> Table:
    """Table 2: each method at the same window, and at the best of those measured."""
    rows = []
    for temperature, name, group in families(speeds):
        at_k = next(item.row for item in group if item.k == k)
        best = max(group, key=lambda item: item.row["speedup"])
        worst = min(item.row["speedup"] for item in group)
        rows.append(
            {
                **named(best), "speedup": at_k["speedup"], "ci": interval(at_k["speedup_ci95"]), "tau": at_k["tau"],
                "best_k": best.k, "best": best.row["speedup"], "lost": 1 - worst / best.row["speedup"],
                "paper": PAPER.get(name) if temperature == 1 else None,
            }
        )  # fmt: skip
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
    return Table("hsddw-ablation", "HSDDW: what each part adds", columns, plain(rows), note)


def families(speeds: Sequence[WindowSpeed]) -> Iterator[tuple[float, str, list[WindowSpeed]]]:
    """Measurements of one method in one mode, in the order measured."""
    for key in dict.fromkeys((item.temperature, item.name) for item in speeds):
        yield *key, [item for item in speeds if (item.temperature, item.name) == key]


def window_speed(item: WindowSpeed) -> Row:
    """Figure 7."""
    low, high = item.row["speedup_ci95"] or (None, None)
    found = {"speedup": item.row["speedup"], "low": low, "high": high, "tokens_per_s": item.row["tokens_per_s"]}
    return {**named(item), "k": item.k, **found}


def by_verifier(watched: Sequence[WatchedMethod]) -> Iterator[tuple[str, str, dict[bool, list[float]]]]:
    """Mode, drafter and verifier, and the entropies of accepted and rejected tokens: of methods whose windows are
    fixed."""
    for item in watched:
        for by in ENTROPY_FROM.get(item.name, ()):
            own = [one for one in item.seen.verified if one.by == by]
            split = {verdict: [one.entropy for one in own if one.accepted is verdict] for verdict in (True, False)}
            yield mode(item.temperature), by, split


def entropy_auc(accepted: Sequence[float], rejected: Sequence[float]) -> float | None:
    """Probability that a rejected token was drawn from a distribution of higher entropy than an accepted one."""
    if not accepted and not rejected:
        return None
    score = torch.tensor([*accepted, *rejected], dtype=torch.float64)
    label = torch.tensor([0.0] * len(accepted) + [1.0] * len(rejected))
    return plain(float(soft_label_auc(score, label)))


def entropy_table(watched: Sequence[WatchedMethod]) -> Table:
    """The means of figure 6, and what entropy is worth as a predictor."""
    rows = [
        {
            "mode": at, "by": by, "accepted": len(values[True]), "rejected": len(values[False]),
            "mean_accepted": mean(values[True]), "mean_rejected": mean(values[False]),
            "auc": entropy_auc(values[True], values[False]),
        }
        for at, by, values in by_verifier(watched)
    ]  # fmt: skip
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
    return Table("hsddw-entropy", "Entropy of accepted and rejected tokens", columns, plain(rows), note)


def density_rows(watched: Sequence[WatchedMethod]) -> list[Row]:
    """Figure 6."""
    edges = np.arange(0, ENTROPY_END, ENTROPY_STEP)
    rows: list[Row] = []
    for at, by, split in by_verifier(watched):
        for verdict, values in split.items():
            places = np.minimum(np.floor(np.asarray(values) / ENTROPY_STEP).astype(int), len(edges) - 1)
            counts = np.bincount(places, minlength=len(edges)) if values else np.zeros(len(edges), int)
            said = {"panel": f"{by}, {at}", "verdict": "accepted" if verdict else "rejected"}
            for edge, count in zip(edges + ENTROPY_STEP / 2, counts, strict=True):
                rows.append({**said, "entropy": edge, "share": count / max(len(values), 1), "tokens": int(count)})
    return rows


def redundancy_table(k: int, watched: Sequence[WatchedMethod]) -> Table:
    """Table 4."""
    rows = []
    for item in watched:
        inner, totals, made = pool([item.seen.inner]), item.totals, item.seen.origin.total()
        rows.append(
            {
                **named(item), "drafted": totals.num_draft_tokens, "accepted": totals.num_accepted,
                "redundancy": totals.redundancy, "inner": inner.redundancy if inner.num_draft_tokens else None,
                "utilisation": totals.verification_rate,
                **{model: item.seen.origin[model] / max(made, 1) for model in ("M1", "M2", "target")},
            }
        )  # fmt: skip
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
    return Table("hsddw-redundancy", "What is drafted in vain", columns, plain(rows), note)


def window_rows(watched: Sequence[WatchedMethod], count: int) -> Iterator[Row]:
    """Figure 8: windows of single answers, the longest of the first method."""
    longest = watched[0].lengths if watched else {}
    for item in watched:
        for prompt in sorted(longest, key=lambda prompt: -longest[prompt])[:count]:
            for window in item.seen.windows:
                if window.prompt == prompt:
                    row = asdict(window)
                    said = {"panel": f"{row.pop('prompt')}, {mode(item.temperature)}", "method": item.name}
                    yield {**said, "round": row.pop("number"), **row}


def tenths(watched: Sequence[WatchedMethod], of: str, seed: int) -> list[Row]:
    """Means of a window's field by tenths of the answers, 95 % intervals over prompts."""
    rows: list[Row] = []
    for item in watched:
        places = [
            min(NUM_TENTHS * window.start // item.lengths[window.prompt], NUM_TENTHS - 1)
            for window in item.seen.windows
        ]
        for place in sorted(set(places)):
            own = [window for window, there in zip(item.seen.windows, places, strict=True) if there == place]
            values = [float(getattr(window, of)) for window in own]
            low, high = mean_interval(values, [window.prompt for window in own], seed)
            found = {of: mean(values), "low": low, "high": high, "rounds": len(own)}
            rows.append(plain({**named(item), "position": (place + 0.5) / NUM_TENTHS, **found}))
    return rows


def summary_of(k: int, watched: Sequence[WatchedMethod], speeds: Sequence[WindowSpeed]) -> dict[str, Any]:
    """Flat numbers that texts quote."""
    found: dict[str, Any] = {}
    for row in ablation_table(k, speeds).rows:
        for key in ("speedup", "tau", "best", "best_k"):
            found[f"{key}_{slug(row['method'], row['mode'])}"] = row[key]
    for row in entropy_table(watched).rows:
        for key in ("mean_accepted", "mean_rejected", "auc"):
            found[f"entropy_{key}_{slug(row['by'], row['mode'])}"] = row[key]
    for row in redundancy_table(k, watched).rows:
        for key in ("redundancy", "utilisation"):
            found[f"{key}_{slug(row['method'], row['mode'])}"] = row[key]
    return found
