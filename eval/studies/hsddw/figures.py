"""What `draftsmith eval hsddw` found, as tables and charts: pure functions of what was watched and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.report.figures import Axis, Chart, Column, Row, Table, plain
from draftsmith.eval.studies.common import ci, mean, mode, slug
from draftsmith.eval.studies.hsddw.watch import Judged, Seen, Window
from draftsmith.modules.decoding.trace import Totals, pool
from draftsmith.modules.metrics import soft_label_auc

# HSDDW, table 2: speed-up on MT-Bench at T=1.
PAPER = {"SD": 2.40, "pre-verify": 2.53, "self-verify": 2.63, "pre+self-verify": 2.69, "HSDDW": 2.95}
# Methods of fixed windows, where no rule chose the tokens by their entropy -> whose verdicts are taken from them.
ENTROPY_FROM = {"SD": ("M1 by target",), "pre-verify": ("M1 by M2", "M2 by target")}
ENTROPY_STEP, ENTROPY_END = 0.25, 6.0  # nats; the last bin holds everything above
NUM_TENTHS = 10


@dataclass(frozen=True)
class Speed:
    """One measured method. name: in tables; k: its window; row: of the bench's results."""

    temperature: float
    name: str
    k: int
    row: dict[str, Any]


@dataclass(frozen=True)
class Watched:
    """One method watched at one window: what it saw, what it cost, and tokens of every answer by the prompt's id."""

    temperature: float
    name: str
    seen: Seen
    totals: Totals
    lengths: dict[str, int]


def ablation_table(k: int, speeds: Sequence[Speed]) -> Table:
    """Table 2: each method at the same window, and at the best of those measured."""
    rows = []
    for temperature, name, group in families(speeds):
        at_k = next(item.row for item in group if item.k == k)
        best = max(group, key=lambda item: item.row["speedup"])
        worst = min(item.row["speedup"] for item in group)
        rows.append(
            plain(
                {
                    "mode": mode(temperature),
                    "method": name,
                    "speedup": at_k["speedup"],
                    "ci": ci(at_k["speedup_ci95"]),
                    "tau": at_k["tau"],
                    "best_k": best.k,
                    "best": best.row["speedup"],
                    "lost": 1 - worst / best.row["speedup"],
                    "paper": PAPER.get(name) if temperature == 1 else None,
                }
            )
        )
    columns = [
        Column("mode", "mode"),
        Column("method", "method"),
        Column("speedup", f"speed-up, k={k}", ".2fx"),
        Column("ci", "95 % CI"),
        Column("tau", "tau", ".2f"),
        Column("best_k", "best k", "d"),
        Column("best", "at it", ".2fx"),
        Column("lost", "worst k loses", ".0%"),
        Column("paper", "paper", ".2fx"),
    ]
    note = (
        "Speed-up over autoregressive decoding, methods of one mode interleaved on the same prompts; tau counts the "
        "bonus token. The methods whose draft is M2 were measured in a run of their own. The best k is chosen on these "
        "prompts. Paper: HSDDW, table 2, other models and a GPU; HSDDW's own MT-Bench, HumanEval, GSM8K and Alpaca at "
        "T=1 are 2.91x, 2.92x, 2.64x and 2.99x."
    )
    return Table("hsddw-ablation", "HSDDW: what each part adds", columns, rows, note)


def families(speeds: Sequence[Speed]) -> Iterator[tuple[float, str, list[Speed]]]:
    """Measurements of one method in one mode, in the order measured."""
    for key in dict.fromkeys((item.temperature, item.name) for item in speeds):
        yield *key, [item for item in speeds if (item.temperature, item.name) == key]


def sensitivity(speeds: Sequence[Speed]) -> Chart:
    """Figure 7."""
    rows = []
    for item in speeds:
        low, high = item.row["speedup_ci95"] or (None, None)
        found = {"speedup": item.row["speedup"], "low": low, "high": high, "tokens_per_s": item.row["tokens_per_s"]}
        rows.append(plain({"mode": mode(item.temperature), "method": item.name, "k": item.k, **found}))
    return Chart(
        "hsddw-window-sensitivity",
        "Speed-up by window size",
        "line",
        rows,
        x=Axis("k", "window k: tokens drafted at most by the first model"),
        y=Axis("speedup", "speed-up over autoregressive decoding", ".2f"),
        series="method",
        facet="mode",
        low="low",
        high="high",
        hover=("tokens_per_s",),
        note="A flat line needs no tuning: figure 7 of the paper shows it for entropy's windows, and a fall for SD.",
    )


def tau_by_window(speeds: Sequence[Speed]) -> Chart:
    rows = [
        plain({"mode": mode(item.temperature), "method": item.name, "k": item.k, "tau": item.row["tau"]})
        for item in speeds
    ]
    return Chart(
        "hsddw-tau-by-window",
        "Tokens per target call by window size",
        "line",
        rows,
        x=Axis("k", "window k"),
        y=Axis("tau", "tau", ".2f"),
        series="method",
        facet="mode",
        note="What the target saves; the chart of speed-ups also counts what drafting costs.",
    )


def pairs(watched: Sequence[Watched]) -> Iterator[tuple[float, str, list[Judged]]]:
    """Mode, drafter and verifier, and the tokens judged: of methods whose windows are fixed."""
    for item in watched:
        for by in ENTROPY_FROM.get(item.name, ()):
            yield item.temperature, by, [one for one in item.seen.judged if one.by == by]


def entropy_auc(judged: Sequence[Judged]) -> float | None:
    """Probability that a rejected token was drawn from a law of higher entropy than an accepted one."""
    if not judged:
        return None
    score = torch.tensor([one.entropy for one in judged], dtype=torch.float64)
    return plain(float(soft_label_auc(score, torch.tensor([float(not one.accepted) for one in judged]))))


def entropy_table(watched: Sequence[Watched]) -> Table:
    """The means of figure 6, and what entropy is worth as a predictor."""
    rows = []
    for temperature, by, judged in pairs(watched):
        values = {verdict: [one.entropy for one in judged if one.accepted is verdict] for verdict in (True, False)}
        rows.append(
            plain(
                {
                    "mode": mode(temperature),
                    "by": by,
                    "accepted": len(values[True]),
                    "rejected": len(values[False]),
                    "mean_accepted": mean(values[True]),
                    "mean_rejected": mean(values[False]),
                    "auc": entropy_auc(judged),
                }
            )
        )
    columns = [
        Column("mode", "mode"),
        Column("by", "drafted, verified"),
        Column("accepted", "accepted", ",d"),
        Column("rejected", "rejected", ",d"),
        Column("mean_accepted", "mean entropy, accepted", ".2f"),
        Column("mean_rejected", "rejected", ".2f"),
        Column("auc", "AUC", ".3f"),
    ]
    note = (
        "Nats, of the law that a token was drawn from (greedy: the softmax at temperature 1); tokens down to the first "
        "rejected one of every draft, windows fixed. AUC: how often a rejected token's entropy is the higher of two."
    )
    return Table("hsddw-entropy", "Entropy of accepted and rejected tokens", columns, rows, note)


def entropy_density(watched: Sequence[Watched]) -> Chart:
    """Figure 6."""
    edges = np.arange(0, ENTROPY_END, ENTROPY_STEP)
    rows: list[Row] = []
    for temperature, by, judged in pairs(watched):
        for verdict in (True, False):
            values = [one.entropy for one in judged if one.accepted is verdict]
            places = np.minimum(np.floor(np.asarray(values) / ENTROPY_STEP).astype(int), len(edges) - 1)
            counts = np.bincount(places, minlength=len(edges)) if values else np.zeros(len(edges), int)
            for edge, count in zip(edges, counts, strict=True):
                rows.append(
                    plain(
                        {
                            "panel": f"{by}, {mode(temperature)}",
                            "verdict": "accepted" if verdict else "rejected",
                            "entropy": edge + ENTROPY_STEP / 2,
                            "share": count / max(len(values), 1),
                            "tokens": int(count),
                        }
                    )
                )
    return Chart(
        "hsddw-entropy-density",
        "Entropy of accepted and rejected tokens",
        "line",
        rows,
        x=Axis("entropy", "entropy of the draft's law [nats]"),
        y=Axis("share", f"share of tokens in {ENTROPY_STEP:g} nats", ".0%", zero=True),
        series="verdict",
        facet="panel",
        hover=("tokens",),
        note="The further apart the two curves of a panel are, the better entropy knows what will be rejected.",
    )


def redundancy_table(k: int, watched: Sequence[Watched]) -> Table:
    """Table 4."""
    rows = []
    for item in watched:
        inner = pool([item.seen.inner])
        made = item.seen.origin.total()
        rows.append(
            plain(
                {
                    "mode": mode(item.temperature),
                    "method": item.name,
                    "drafted": item.totals.num_draft_tokens,
                    "accepted": item.totals.num_accepted,
                    "redundancy": item.totals.redundancy,
                    "inner": inner.redundancy if inner.num_draft_tokens else None,
                    "utilisation": item.totals.verification_rate,
                    **{model: item.seen.origin[model] / max(made, 1) for model in ("M1", "M2", "target")},
                }
            )
        )
    columns = [
        Column("mode", "mode"),
        Column("method", f"method, k={k}"),
        Column("drafted", "drafted", ",d"),
        Column("accepted", "accepted", ",d"),
        Column("redundancy", "sigma", ".0%"),
        Column("inner", "sigma of M1 at M2", ".0%"),
        Column("utilisation", "eta", ".0%"),
        Column("M1", "from M1", ".0%"),
        Column("M2", "from M2", ".0%"),
        Column("target", "from the target", ".0%"),
    ]
    note = (
        "Sigma: 1 - accepted / drafted, of what the target was handed; at M2, of what M1 drafted for it. Eta, the "
        "target's utilisation: its inferences by the length of the output, less is better. From: who made the tokens "
        "of the answers; those of the target are corrections and bonus tokens."
    )
    return Table("hsddw-redundancy", "What is drafted in vain", columns, rows, note)


def window_examples(watched: Sequence[Watched], count: int) -> Chart:
    """Figure 8: windows of single answers, the longest of the first method."""
    longest = watched[0].lengths if watched else {}
    rows = []
    for item in watched:
        for prompt in sorted(longest, key=lambda prompt: -longest[prompt])[:count]:
            for window in item.seen.windows:
                if window.prompt == prompt:
                    rows.append(plain({"panel": f"{prompt}, {mode(item.temperature)}", **window_row(item, window)}))
    return Chart(
        "hsddw-windows",
        "Windows over single answers",
        "line",
        rows,
        x=Axis("round", "round"),
        y=Axis("drafted", "tokens handed to the target", zero=True),
        series="method",
        facet="panel",
        hover=("accepted", "threshold", "start"),
        note="Each point is a round: its window, with the entropy threshold it was drafted under on hover.",
    )


def window_row(item: Watched, window: Window) -> dict[str, Any]:
    return {
        "method": item.name,
        "round": window.number,
        "start": window.start,
        "drafted": window.drafted,
        "accepted": window.accepted,
        "threshold": window.threshold,
    }


def tenths(watched: Sequence[Watched], of: str, seed: int) -> list[Row]:
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
            position = (place + 0.5) / NUM_TENTHS
            rows.append(plain({"mode": mode(item.temperature), "method": item.name, "position": position, **found}))
    return rows


def window_over_answer(watched: Sequence[Watched], seed: int) -> Chart:
    return over_answer(
        Axis("drafted", "mean window [tokens]", ".1f", zero=True),
        ("hsddw-window-by-position", "Windows over an answer"),
        tenths(watched, "drafted", seed),
        "Means over prompts by tenths of the answer: the threshold is 0 before the first rejection, so answers begin "
        "with windows of one token of M1, or one verification by M2.",
    )


def threshold_over_answer(watched: Sequence[Watched], seed: int) -> Chart:
    return over_answer(
        Axis("threshold", "mean entropy threshold [nats]", ".2f", zero=True),
        ("hsddw-threshold-by-position", "Entropy threshold over an answer"),
        tenths(watched, "threshold", seed),
        "The running mean of entropies at rejected tokens: self-verify's of M1, HSDDW's of M2.",
    )


def over_answer(y: Axis, name: tuple[str, str], rows: Sequence[Row], note: str) -> Chart:
    """name: of the file, and the title."""
    return Chart(
        name[0],
        name[1],
        "line",
        rows,
        x=Axis("position", "place in the answer", ".0%"),
        y=y,
        series="method",
        facet="mode",
        low="low",
        high="high",
        hover=("rounds",),
        note=note,
    )


def summary_of(k: int, watched: Sequence[Watched], speeds: Sequence[Speed]) -> dict[str, Any]:
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
