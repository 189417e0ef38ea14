"""Benchmarks as figures: tables of speed-up and tau by task (EAGLE-2, table 1) and of counts; charts of methods, and of
two methods against each other prompt by prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from draftsmith.data.console import Column, Table, format_interval, json_values
from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    SQUARE,
    Chart,
    Drawing,
    Rows,
    cell_sizes,
    chart,
    count,
    drawn,
    heatmap,
    interval_marks,
    names,
    points,
    tips,
    x_number,
    y_number,
)
from draftsmith.eval.report.runs import Run, prompt_rows, temperature_of, temperatures
from draftsmith.modules.drafters.methods import LOSSY

Row = dict[str, Any]
RATES = ("speedup", "tau")


def bench_figures(runs: Sequence[Run]) -> list[Table | Chart]:
    """runs: comparable ones, with the same temperatures."""
    rows = labelled(runs)
    found: list[Table | Chart] = []
    for temperature in temperatures(runs[0]):
        found.append(headline([row for row in rows if row["T"] == temperature], temperature, len(runs) > 1))
    return [*found, *charts(rows), *paired_charts(runs), counts(rows)]


def labelled(runs: Sequence[Run]) -> list[Row]:
    """Rows of all methods with `T`, `run`, and `label`: the method, and its run where several have it."""
    rows = [{**row, "T": temperature_of(run, row), "run": run.name} for run in runs for row in run.results["methods"]]
    seen = Counter((row["method"], row["T"]) for row in rows)
    for row in rows:
        row["label"] = row["method"] + (f" ({row['run']})" if seen[row["method"], row["T"]] > 1 else "")
    return rows


def temperature_text(temperature: float) -> str:
    return "T = 0 (greedy)" if temperature == 0 else f"T = {temperature:g}"


def headline(rows: Sequence[Row], temperature: float, several: bool) -> Table:
    """Methods by tasks, each with speed-up and tau, and both over all prompts with their intervals; lossless ones."""
    left_out = any(row["method"].endswith(LOSSY) for row in rows)
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
        note += " Mean of tasks, as papers have it: each task counts alike, however long its answers."
    if left_out:
        note += f" What is{LOSSY} stands in the table of counts alone."
    for group, speedup, tau in groups:
        columns += [Column(speedup, "speed-up", ".2fx", group), Column(tau, "τ", ".2f", group)]
    table_rows = []
    for row in rows:
        shown = {key: row.get(key) for key in ("method", "run", *RATES, "macro_speedup", "macro_tau")}
        shown |= {f"{name}_ci": format_interval(row.get(f"{name}_ci95")) for name in RATES}
        for task, part in (row.get("by_task") or {}).items():
            shown |= {f"{name} {task}": part.get(name) for name in RATES}
        table_rows.append(shown)
    title = f"Speed-up and τ at {temperature_text(temperature)}"
    return Table(f"headline-t{temperature:g}", title, columns, table_rows, note)


def counts(rows: Sequence[Row]) -> Table:
    """What was counted, and whether the output is the target's own."""
    columns = [Column("T", "T", "g"), Column("label", "method"), Column("prompts", "prompts", ",")]
    columns += [Column("tokens", "tokens", ","), Column("tokens_per_s", "tokens/s", ",.1f")]
    columns += [Column("num_target_calls", "target calls", ","), Column("num_draft_tokens", "drafted", ",")]
    columns += [Column("num_accepted", "accepted", ","), Column("discard_rate", "discarded", ".0%")]
    columns += [Column("verification_rate", "verified", ".2f"), Column("equal", "= ar")]
    columns += [Column("copied_prompt", "of the prompt", ".0%", "copied")]
    columns += [Column("copied_answer", "of an answer", ".0%", "copied")]
    columns += [Column("tau_copying", "τ, copying", ".2f"), Column("tau_new", "τ, other text", ".2f")]
    shown = [{**row, "equal": equality(row)} for row in rows]
    note = (
        "discarded: drafted tokens that were not emitted, by emitted tokens. verified: target calls by emitted "
        "tokens. = ar: in greedy float32 decoding, whether every answer equals the autoregressive one. copied: tokens "
        "that go on with a repetition, they and the three before them having stood first in prompt or answer; τ of the "
        "rounds that begin with such a token, and of the others, prefills not counted."
    )
    return Table("counts", "What was counted", columns, shown, note)


def equality(row: Row) -> str:
    if row.get("matches_ar") is None:
        return "–"
    return "yes" if row["matches_ar"] else f"no ({row.get('num_differing', '?')})"


def charts(rows: Sequence[Row]) -> list[Chart]:
    overall = []
    by_task = []
    for row in rows:
        named = {"method": row["label"], "temperature": temperature_text(row["T"])}
        low, high = row.get("speedup_ci95") or (None, None)
        overall.append(json_values({**named, **rates(row), "low": low, "high": high}))
        by_task += [
            json_values({**named, "task": task, **rates(part)}) for task, part in (row.get("by_task") or {}).items()
        ]
    shown = {"speedup": overall, "tau-and-speedup": overall, "speedup-by-task": by_task, "tau-by-task": by_task}
    return [chart(name, DRAWINGS[name], own) for name, own in shown.items() if own]


def rates(row: Mapping[str, Any]) -> Row:
    return {name: row.get(name) for name in (*RATES, "tokens_per_s", "prompts")}


def panelled(layers: Sequence[Any], rows: Rows, **sizes: Any) -> Any:
    """A panel for each temperature where there are several."""
    return drawn(layers, rows, "temperature" if count(rows, "temperature") > 1 else None, **sizes)


def draw_speedup(rows: Rows) -> Any:
    x = x_number("speedup", "speed-up", ".2f", zero=True)
    y = names("method", scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15))
    numbers = {"speedup": ".2f", "low": ".2f", "high": ".2f", "tau": ".2f", "tokens_per_s": ".1f"}
    shown = tips("method", "temperature", "prompts", **numbers)
    bars = alt.Chart().mark_bar(cornerRadiusEnd=2).encode(x, y, tooltip=shown)
    layers = [bars, interval_marks(alt.Chart().encode(y), x, along="x")]  # a bar would hide half of its interval
    return panelled(layers, rows, height=BAR_HEIGHT * count(rows, "method"))


def tau_and_speedup(rows: Rows) -> Any:
    x = x_number("tau", "τ, emitted tokens per target call", ".2f")
    y = y_number("speedup", "speed-up", ".2f")
    shown = tips("method", "temperature", tau=".2f", speedup=".2f", tokens_per_s=".1f")
    return panelled([points(x, y, "method", shown)], rows)


def draw_by_task(rows: Rows, key: str, title: str) -> Any:
    x = alt.X("task:N", title="task", sort=None, axis=alt.Axis(labelAngle=-35, grid=False, labelOverlap=False))
    shown = tips("method", "task", "temperature", "prompts", **{key: ".2f"})
    sizes = cell_sizes(rows, "task", "method")
    if count(rows, "temperature") == 1:  # as wide as there is room
        del sizes["width"]
    return panelled(heatmap(rows, x, names("method"), (key, title, ".2f"), shown), rows, **sizes)


BY_TASK = "A cell is a ratio of sums over the prompts of one task; bright is better."
DRAWINGS = {
    "speedup": Drawing(
        "Speed-up by method", draw_speedup,
        "Bars over all prompts, with 95 % bootstrap intervals; 1 is autoregressive decoding.",
    ),
    "tau-and-speedup": Drawing(
        "What τ is worth", tau_and_speedup,
        "A method far to the right and low emits many tokens a call, and pays for them with its drafts.",
    ),
    "speedup-by-task": Drawing("Speed-up by task", lambda rows: draw_by_task(rows, "speedup", "speed-up"), BY_TASK),
    "tau-by-task": Drawing("τ by task", lambda rows: draw_by_task(rows, "tau", "τ"), BY_TASK),
}  # fmt: skip


def paired_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Method against method, a chart a temperature, where prompts were kept."""
    for temperature in temperatures(runs[0]):
        rows = speeds(runs, temperature)
        if count(rows, "method") > 1:
            several = f" at {temperature_text(temperature)}" if len(temperatures(runs[0])) > 1 else ""
            note = "One point a prompt; above the dashed line the method along y is faster. Choose both below."
            yield chart(f"against-t{temperature:g}", Drawing(f"Method against method{several}", against, note), rows)


def speeds(runs: Sequence[Run], temperature: float) -> list[Row]:
    """Tokens per second of every method on every prompt, its turns together: rows of `against`."""
    found = []
    for run in runs:
        clock = "cpu_s" if run.meta.get("clock") == "cpu" else "wall_s"
        several = f" ({run.name})" if len(runs) > 1 else ""
        rows = [
            {"method": row["method"] + several, "task": row.get("task") or "prompts", "prompt": str(row["id"]), **times}
            for row in prompt_rows(run)
            for times in [{"tokens": row["tokens"], "seconds": row[clock]}]
            if temperature_of(run, row) == temperature and all(times.values())
        ]
        if rows:
            # Files of several tasks may number their prompts alike.
            sums = pd.DataFrame(rows).groupby(["method", "task", "prompt"], sort=False, as_index=False).sum()
            sums["tokens_per_s"] = sums.pop("tokens") / sums.pop("seconds")
            found += json_values(sums.to_dict("records"))
    return found


def against(rows: Rows) -> Any:
    """Two methods prompt by prompt, chosen by the reader: `rows` have method, prompt, task and tokens_per_s.

    A prompt above the diagonal is faster by the method along y.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    first = methods[0]
    others = [method for method in methods[1:] if not method.endswith(LOSSY)] or methods[1:]
    last = max(others, key=lambda method: sum(row["tokens_per_s"] for row in rows if row["method"] == method))
    choose = [
        alt.param(name=name, value=value, bind=alt.binding_select(options=list(methods), name=title))
        for name, value, title in (("method_x", first, "along x "), ("method_y", last, "along y "))
    ]

    def pairs() -> Any:
        """One row a prompt: x and y."""
        return (
            alt.Chart()
            .transform_calculate(
                along_x="datum.method == method_x ? datum.tokens_per_s : null",
                along_y="datum.method == method_y ? datum.tokens_per_s : null",
            )
            .transform_aggregate(x="max(along_x)", y="max(along_y)", groupby=["prompt", "task"])
            .transform_filter("isValid(datum.x) && isValid(datum.y)")
        )

    diagonal = (
        pairs()
        .transform_aggregate(most_x="max(x)", most_y="max(y)")
        .transform_calculate(end="[0, max(datum.most_x, datum.most_y)]")
        .transform_flatten(["end"])
        .mark_line(style="reference")
        .encode(x="end:Q", y="end:Q")
    )
    points = (
        pairs()
        .transform_calculate(ratio="datum.y / datum.x")
        .mark_point()
        .encode(
            x=alt.X("x:Q", title="tokens/s of the method along x", scale=alt.Scale(zero=True)),
            y=alt.Y("y:Q", title="tokens/s of the method along y", scale=alt.Scale(zero=True)),
            color=alt.Color("task:N", title="task"),
            shape=alt.Shape("task:N", title="task"),
            tooltip=[
                alt.Tooltip("prompt:N"),
                alt.Tooltip("task:N"),
                alt.Tooltip("x:Q", title="tokens/s along x", format=".1f"),
                alt.Tooltip("y:Q", title="tokens/s along y", format=".1f"),
                alt.Tooltip("ratio:Q", title="y by x", format=".2f"),
            ],
        )
    )
    drawn = alt.layer(points, diagonal, data=alt.Data(values=list(rows))).add_params(*choose)
    return drawn.properties(width=SQUARE + 60, height=SQUARE)
