"""Verdicts, tables and charts of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from draftsmith.data.console import Column, Table, format_interval, json_values
from draftsmith.eval.bench.results import BASELINE, shown_classes
from draftsmith.eval.bench.tables import mode, results_tables
from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    Chart,
    Drawing,
    Rows,
    chart,
    color,
    count,
    drawn,
    tips,
    x_number,
    y_number,
)
from draftsmith.eval.report.runs import Run, temperatures, uses_head

Row = dict[str, Any]
RATES = ("speedup", "tau")
BY_CONTEXT = "tau-by-context"


def bench_figures(run: Run) -> list[Table | Chart]:
    """Return tables and charts of a benchmark."""
    rows = run.results["methods"]
    return [*results_tables({"failures": (), **run.results}), *charts(rows), counts(rows)]


def verdicts(run: Run) -> list[str]:
    """Return sentences for each temperature: what is faster than the target alone, and whether answers are its own.

    A method whose interval holds 1 is not called faster. Heads that were trained are named, also where they lose.
    """
    lines = list[str]()
    for temperature in temperatures(run):
        rows = [row for row in run.results["methods"] if row["temperature"] == temperature]
        others = [row for row in rows if row["method"] != BASELINE]
        best = max(others, key=lambda row: row["speedup"], default=None)
        if best is None:
            continue
        heads = [row for row in others if uses_head(row["method"])]
        text = f"{mode(temperature).capitalize()}: {speed_text(best)}"
        if heads and best not in heads:
            text += f"; of the heads, {speed_text(max(heads, key=lambda row: row['speedup']))}"
        if unequal := [row["method"] for row in rows if row["matches_ar"] is False]:
            text += f". Answers of {', '.join(unequal)} differ from the target's"
        elif best["matches_ar"]:
            text += "; every answer of every method is the target's own"
        lines.append(f"{text}.")
    return lines


def speed_text(row: Row) -> str:
    """Say how fast a method is, as far as its interval goes."""
    low, high = row["speedup_ci95"] or (0.0, float("inf"))
    interval = format_interval(row["speedup_ci95"], between=" to ") or "one prompt, no interval"
    claim = "is faster" if low > 1 else "is slower" if high < 1 else "is neither faster nor slower for certain"
    return (
        f"{row['method']} {claim} than the target alone: {row['speedup']:.2f} times ({interval}), "
        f"{row['tokens_per_s']:,.1f} tokens/s, acceptance length {row['tau']:.2f}"
    )


def counts(rows: Sequence[Row]) -> Table:
    """Return the table of what was counted."""
    columns = [Column("temperature", "T", "g"), Column("method", "method"), Column("prompts", "answers", ",")]
    columns += [Column("tokens", "tokens", ","), Column("num_target_calls", "target calls", ",")]
    columns += [Column("num_draft_tokens", "drafted", ","), Column("num_accepted", "accepted", ",")]
    columns += [Column("copied_prompt", "of the prompt", ".0%", "copied")]
    columns += [Column("copied_answer", "of an answer", ".0%", "copied")]
    note = (
        "copied: tokens that continue a repetition (they and the three before them occurred earlier in the prompt or "
        "the answer); such text is easier to draft."
    )
    return Table("counts", "Counts", columns, rows, note)


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of all methods."""
    data = []
    for row in rows:
        low, high = row.get("speedup_ci95") or (None, None)
        cells = {key: row.get(key) for key in (*RATES, "tokens_per_s")}
        named = {"method": row["method"], "temperature": mode(row["temperature"])}
        data.append(json_values({**named, **cells, "low": low, "high": high}))
    points = points_by_context(rows)
    return [
        chart(name, drawing, points if name == BY_CONTEXT else data)
        for name, drawing in DRAWINGS.items()
        if name != BY_CONTEXT or points
    ]


def points_by_context(rows: Sequence[Row]) -> list[Row]:
    """Return the points of acceptance length by context; none if all rounds are of one class."""
    points = []
    for row in rows:
        for part in shown_classes(row, "by_context"):
            low, high = part["tau_ci95"] or (None, None)
            named = {"method": row["method"], "temperature": mode(row["temperature"])}
            # A class from 0 has no place on a logarithmic axis but in its middle.
            place = part["from"] or part["to"] // 2
            points.append(json_values({**named, "context": place, "tau": part["tau"], "low": low, "high": high}))
    return points if len({point["context"] for point in points}) > 1 else []


def draw_speedup(rows: Rows) -> Any:
    """Draw a bar for each method, with its interval."""
    x = x_number("speedup", "speed-up", ".2f", zero=True)
    scale = alt.Scale(paddingInner=0.3, paddingOuter=0.15)
    y = alt.Y("method:N", title=None, sort=None, axis=alt.Axis(grid=False, labelOverlap=False), scale=scale)
    numbers = {"speedup": ".2f", "low": ".2f", "high": ".2f", "tau": ".2f", "tokens_per_s": ".1f"}
    bars = alt.Chart().mark_bar(cornerRadiusEnd=2).encode(x, y, tooltip=tips("method", "temperature", **numbers))
    # The interval is drawn over the bar, which would hide half of it.
    known = alt.Chart().transform_filter("isValid(datum.low) && isValid(datum.high)")
    low = alt.X("low:Q", **{key: x[key] for key in ("title", "scale", "axis")})
    intervals = known.mark_rule(style="interval").encode(y, x=low, x2=alt.X2("high:Q"))
    return drawn([bars, intervals], rows, height=BAR_HEIGHT * count(rows, "method"))


def draw_tau_and_speedup(rows: Rows) -> Any:
    """Draw a point for each method, with a color and a shape."""
    x = x_number("tau", "τ, emitted tokens per target call", ".2f")
    y = y_number("speedup", "speed-up", ".2f")
    marks = color("method"), color("method", channel=alt.Shape)
    texts = tips("method", "temperature", tau=".2f", speedup=".2f", tokens_per_s=".1f")
    return drawn([alt.Chart().mark_point().encode(x, y, *marks, tooltip=texts)], rows)


def draw_tau_by_context(rows: Rows) -> Any:
    """Draw a line for each method, with intervals."""
    contexts = sorted({row["context"] for row in rows})
    axis = alt.Axis(values=contexts, format=",", grid=False)
    x = alt.X("context:Q", title="tokens before the round", scale=alt.Scale(type="log", base=2, padding=10), axis=axis)
    y, texts = y_number("tau", "τ of rounds", ".2f"), tips("method", context=",", tau=".2f", low=".2f", high=".2f")
    line = alt.Chart().mark_line(point=alt.OverlayMarkDef(filled=True, size=38))
    layers = [line.encode(x, y, color("method"), tooltip=texts)]
    if any(row["low"] is not None for row in rows):
        low = alt.Y("low:Q", **{key: y[key] for key in ("title", "scale", "axis")})
        rules = alt.Chart().transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.6)
        layers.append(rules.encode(x, low, color("method"), y2=alt.Y2("high:Q")))
    return drawn(layers, rows)


DRAWINGS = {
    "speedup": Drawing(
        "Speed-up by method", draw_speedup,
        "Bars over all prompts, with 95 % bootstrap intervals; 1 is autoregressive decoding.",
    ),
    "tau-and-speedup": Drawing(
        "Speed-up against τ", draw_tau_and_speedup,
        "A method far to the right and low emits many tokens per call, and pays for them with its drafts.",
    ),
    BY_CONTEXT: Drawing(
        "τ by context", draw_tau_by_context,
        "Of rounds, by the tokens before them, with 95 % bootstrap intervals over prompts.",
    ),
}  # fmt: skip
