"""Tables and charts of benchmarks: speed-up and tau by task (as EAGLE-2, table 1), counts, and two charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from draftsmith.data.console import Column, Table, format_interval, json_values
from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    Chart,
    Drawing,
    Rows,
    chart,
    colour,
    count,
    drawn,
    tips,
    x_number,
    y_number,
)
from draftsmith.eval.report.runs import Run, temperatures
from draftsmith.modules.drafters.methods import LOSSY

Row = dict[str, Any]
RATES = ("speedup", "tau")


def bench_figures(runs: Sequence[Run]) -> list[Table | Chart]:
    """Return tables and charts of comparable runs at the same temperatures."""
    rows = labelled(runs)
    tables: list[Table | Chart] = [
        headline([row for row in rows if row["T"] == temperature], temperature, len(runs) > 1)
        for temperature in temperatures(runs[0])
    ]
    return [*tables, *charts(rows), counts(rows)]


def labelled(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of all methods with `T`, `run` and `label`: the method, with its run if several have it."""
    rows = [{**row, "T": row["temperature"], "run": run.name} for run in runs for row in run.results["methods"]]
    seen = Counter((row["method"], row["T"]) for row in rows)
    for row in rows:
        row["label"] = row["method"] + (f" ({row['run']})" if seen[row["method"], row["T"]] > 1 else "")
    return rows


def temperature_text(temperature: float) -> str:
    return "T = 0 (greedy)" if temperature == 0 else f"T = {temperature:g}"


def headline(rows: Sequence[Row], temperature: float, several: bool) -> Table:
    """Return the table of lossless methods by tasks, with intervals of the rates over all prompts."""
    has_lossy = any(row["method"].endswith(LOSSY) for row in rows)
    rows = [row for row in rows if not row["method"].endswith(LOSSY)]
    columns = [Column("method", "method"), *([Column("run", "run")] if several else [])]
    for key, title, form in (("speedup", "speed-up", ".2fx"), ("tau", "τ", ".2f")):
        columns += [Column(key, title, form, "all prompts"), Column(f"{key}_ci", "95 % CI", "", "all prompts")]
    tasks = dict.fromkeys(task for row in rows for task in row.get("by_task") or {})
    groups = [(task, f"speedup {task}", f"tau {task}") for task in tasks]
    note = (
        "Speed-up over this engine's own autoregressive decoding in the same run; τ: emitted tokens per target call, "
        "the bonus token included. Over all prompts: ratios of sums, with bootstrap intervals over prompts."
    )
    if any(row.get("macro_speedup") is not None for row in rows):
        groups = [("mean of tasks", "macro_speedup", "macro_tau"), *groups]
        note += " Mean of tasks, as in papers: each task counts alike, however long its answers."
    if has_lossy:
        note += f" Methods that are{LOSSY} are in the table of counts only."
    for group, speedup, tau in groups:
        columns += [Column(speedup, "speed-up", ".2fx", group), Column(tau, "τ", ".2f", group)]
    table_rows = []
    for row in rows:
        cells = {key: row.get(key) for key in ("method", "run", *RATES, "macro_speedup", "macro_tau")}
        cells |= {f"{name}_ci": format_interval(row.get(f"{name}_ci95")) for name in RATES}
        for task, part in (row.get("by_task") or {}).items():
            cells |= {f"{name} {task}": part.get(name) for name in RATES}
        table_rows.append(cells)
    title = f"Speed-up and τ at {temperature_text(temperature)}"
    return Table(f"headline-t{temperature:g}", title, columns, table_rows, note)


def counts(rows: Sequence[Row]) -> Table:
    """Return the table of counts, which says whether greedy answers equal the target's own."""
    columns = [Column("T", "T", "g"), Column("label", "method"), Column("prompts", "prompts", ",")]
    columns += [Column("tokens", "tokens", ","), Column("tokens_per_s", "tokens/s", ",.1f")]
    columns += [Column("num_target_calls", "target calls", ","), Column("num_draft_tokens", "drafted", ",")]
    columns += [Column("num_accepted", "accepted", ","), Column("discard_rate", "discarded", ".0%")]
    columns += [Column("verification_rate", "verified", ".2f"), Column("equal", "= ar")]
    columns += [Column("copied_prompt", "of the prompt", ".0%", "copied")]
    columns += [Column("copied_answer", "of an answer", ".0%", "copied")]
    table_rows = []
    for row in rows:
        equal = "–"
        if row.get("matches_ar") is not None:
            equal = "yes" if row["matches_ar"] else f"no ({row.get('num_differing', '?')})"
        table_rows.append({**row, "equal": equal})
    note = (
        "discarded: drafted tokens that were not emitted, per emitted token. verified: target calls per emitted token. "
        "= ar: in greedy float32 decoding, whether every answer equals the autoregressive one. copied: tokens that "
        "continue a repetition (they and the three before them occurred earlier in the prompt or the answer)."
    )
    return Table("counts", "Counts", columns, table_rows, note)


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of all methods."""
    data = []
    for row in rows:
        low, high = row.get("speedup_ci95") or (None, None)
        cells = {key: row.get(key) for key in (*RATES, "tokens_per_s")}
        named = {"method": row["label"], "temperature": temperature_text(row["T"])}
        data.append(json_values({**named, **cells, "low": low, "high": high}))
    return [chart(name, drawing, data) for name, drawing in DRAWINGS.items()]


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
    """Draw a point for each method, with a colour and a shape."""
    x = x_number("tau", "τ, emitted tokens per target call", ".2f")
    y = y_number("speedup", "speed-up", ".2f")
    marks = colour("method"), colour("method", channel=alt.Shape)
    texts = tips("method", "temperature", tau=".2f", speedup=".2f", tokens_per_s=".1f")
    return drawn([alt.Chart().mark_point().encode(x, y, *marks, tooltip=texts)], rows)


DRAWINGS = {
    "speedup": Drawing(
        "Speed-up by method", draw_speedup,
        "Bars over all prompts, with 95 % bootstrap intervals; 1 is autoregressive decoding.",
    ),
    "tau-and-speedup": Drawing(
        "Speed-up against τ", draw_tau_and_speedup,
        "A method far to the right and low emits many tokens per call, and pays for them with its drafts.",
    ),
}  # fmt: skip
