"""Verdicts, tables and charts of benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from draftsmith.data.console import Column, Table, format_interval, json_values
from draftsmith.eval.bench.acceptance import acceptance_tables
from draftsmith.eval.bench.results import BASELINE
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
from draftsmith.eval.report.runs import Run, temperatures
from draftsmith.modules.drafters.methods import LOSSY

Row = dict[str, Any]
RATES = ("speedup", "tau")
MEAN = "mean of tasks"


def bench_figures(runs: Sequence[Run]) -> list[Table | Chart]:
    """Return tables and charts of comparable runs at the same temperatures."""
    rows = labeled(runs)
    figures: list[Table | Chart] = []
    for temperature in temperatures(runs[0]):
        own = [row for row in rows if row["T"] == temperature]
        figures += [headline(own, temperature), *by_task(own, temperature)]
        shown = [{**row, "method": row["label"]} for row in own]
        figures += acceptance_tables(shown, f"-t{temperature:g}", temperature_text(temperature))
    return [*figures, *charts(rows), counts(rows)]


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each temperature: the fastest lossless method, and whether answers are the target's."""
    rows, found = labeled(runs), list[str]()
    for temperature in temperatures(runs[0]):
        own = [row for row in rows if row["T"] == temperature and not row["method"].endswith(LOSSY)]
        best = max(own, key=lambda row: row["speedup"])
        mode = "Greedy" if temperature == 0 else f"At temperature {temperature:g}"
        if best["method"] == BASELINE:
            text = f"{mode}, no method is faster than the target alone ({best['tokens_per_s']:,.1f} tokens/s)"
        else:
            interval = format_interval(best.get("speedup_ci95"), between=" to ")
            text = (
                f"{mode}, {best['label']} is the fastest: {best['speedup']:.2f} times the target alone"
                f"{f' ({interval})' if interval else ''}, {best['tokens_per_s']:,.1f} tokens/s, "
                f"acceptance length {best['tau']:.2f}"
            )
        unequal = [row["label"] for row in own if row.get("matches_ar") is False]
        if unequal:
            text += f". Answers of {', '.join(unequal)} differ from the target's"
        elif best.get("matches_ar"):
            text += "; every answer of every method is the target's own"
        found.append(f"{text}.")
    return found


def labeled(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of all methods with `T`, `run` and `label`: the method, with its run if several have it."""
    rows = [{**row, "T": row["temperature"], "run": run.name} for run in runs for row in run.results["methods"]]
    seen = Counter((row["method"], row["T"]) for row in rows)
    for row in rows:
        row["label"] = row["method"] + (f" ({row['run']})" if seen[row["method"], row["T"]] > 1 else "")
    return rows


def temperature_text(temperature: float) -> str:
    return "T = 0 (greedy)" if temperature == 0 else f"T = {temperature:g}"


def equal_text(row: Row) -> str:
    """Say whether greedy float32 answers are the target's own."""
    if row.get("matches_ar") is None:
        return "–"
    return "yes" if row["matches_ar"] else f"no ({row.get('num_differing', '?')})"


def headline(rows: Sequence[Row], temperature: float) -> Table:
    """Return the table of lossless methods over all prompts, with intervals."""
    lossy = len(rows)
    rows = [row for row in rows if not row["method"].endswith(LOSSY)]
    lossy -= len(rows)
    columns = [
        Column("label", "method"),
        Column("tokens_per_s", "tokens/s", ",.1f"),
        Column("speedup", "speed-up", ".2fx"),
        Column("speedup_ci", "95 % CI"),
        Column("tau", "τ", ".2f"),
        Column("tau_ci", "95 % CI"),
        Column("acceptance_rate", "accepted", ".0%"),
        Column("equal", "= target"),
    ]
    cells = [
        {
            **{column.key: row.get(column.key) for column in columns},
            **{f"{name}_ci": format_interval(row.get(f"{name}_ci95")) for name in RATES},
            "equal": equal_text(row),
        }
        for row in rows
    ]
    note = (
        "Speed-up over this engine's own autoregressive decoding in the same run; τ: acceptance length, emitted tokens "
        "per target call, the bonus token included. Ratios of sums over all prompts, with bootstrap intervals over "
        "prompts. accepted: of the drafted tokens. = target: whether every greedy float32 answer is the target's own."
    )
    if lossy:
        note += f" Methods that are{LOSSY} are in the table of counts only."
    title = f"Speed-up and τ at {temperature_text(temperature)}"
    return Table(f"headline-t{temperature:g}", title, columns, cells, note)


def by_task(rows: Sequence[Row], temperature: float) -> list[Table]:
    """Return the table of lossless methods by task, if there are several tasks."""
    rows = [row for row in rows if not row["method"].endswith(LOSSY) and row["method"] != BASELINE]
    tasks = list(dict.fromkeys(task for row in rows for task in row.get("by_task") or {}))
    if len(tasks) < 2:
        return []

    def parts(row: Row) -> Row:
        return {**(row.get("by_task") or {}), MEAN: {name: row.get(f"macro_{name}") for name in RATES}}

    # Columns are what there is less of, so that they fit the page.
    numbers = {row["label"]: parts(row) for row in rows}
    names, groups, first = list(numbers), [*tasks, MEAN], "method"
    if len(groups) > len(names):
        numbers = {task: {name: numbers[name].get(task, {}) for name in names} for task in groups}
        groups, first = names, "task"
    columns = [Column("name", first)]
    for group in groups:
        columns += [Column(f"speedup {group}", "×", ".2f", group), Column(f"tau {group}", "τ", ".2f", group)]
    cells = [
        {
            "name": name,
            **{f"{rate} {group}": own[group].get(rate) for group in groups for rate in RATES if group in own},
        }
        for name, own in numbers.items()
    ]
    note = f"×: speed-up. {MEAN.capitalize()}, as in papers: each task counts alike, however long its answers."
    return [Table(f"tasks-t{temperature:g}", f"By task at {temperature_text(temperature)}", columns, cells, note)]


def counts(rows: Sequence[Row]) -> Table:
    """Return the table of what was counted."""
    columns = [Column("T", "T", "g"), Column("label", "method"), Column("prompts", "prompts", ",")]
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
    """Draw a point for each method, with a color and a shape."""
    x = x_number("tau", "τ, emitted tokens per target call", ".2f")
    y = y_number("speedup", "speed-up", ".2f")
    marks = color("method"), color("method", channel=alt.Shape)
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
