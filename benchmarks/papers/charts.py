"""Charts of the papers' scripts, drawn into OUTPUT/report.html."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt

from draftsmith.data.store.files import write_text
from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    PANEL,
    PANEL_WIDTH,
    Draw,
    Drawing,
    Rows,
    colour,
    count,
    drawn,
    tips,
)
from draftsmith.eval.report.page import render
from draftsmith.eval.report.runs import read_runs
from draftsmith.eval.report.sections import table_section

MAX_CELL_LABELS = 260  # numbers in a heatmap, above which they are left out


def number(
    channel: Any, key: str, title: str, form: str = "", zero: bool = False, log: bool = False, unit: bool = False
) -> Any:
    """Return a quantitative x or y. zero: begin at 0. unit: from 0 to 1."""
    scale = alt.Scale(zero=True) if zero else alt.Scale(zero=False, padding=10)
    scale = alt.Scale(type="log", padding=10) if log else alt.Scale(domain=[0, 1]) if unit else scale
    axis = alt.Axis(tickCount=6, format=form) if form else alt.Axis(tickCount=6)
    return channel(f"{key}:Q", title=title, scale=scale, axis=axis)


x_number, y_number = partial(number, alt.X), partial(number, alt.Y)


def names(key: str) -> Any:
    """Return names along y, in the order of the rows, all of them and without a title."""
    return alt.Y(f"{key}:N", title=None, sort=None, axis=alt.Axis(grid=False, labelOverlap=False))


def interval_marks(base: Any, across: Any, band: bool = False, along: str = "y") -> Any:
    """Mark intervals from `low` to `high` on the channel `across`: a band around a line, or a rule."""
    both = base.transform_filter("isValid(datum.low) && isValid(datum.high)")
    marked = both.mark_area(opacity=0.18) if band else both.mark_rule(style="interval")
    start, end = (alt.Y, alt.Y2) if along == "y" else (alt.X, alt.X2)
    low = start("low:Q", **{key: across[key] for key in ("title", "scale", "axis")})
    return marked.encode(**{along: low, f"{along}2": end("high:Q")})


def lines(
    x: Any, y: Any, series: Any, tooltip: Sequence[alt.Tooltip], panel: str = PANEL, *, band: bool = False,
    many: bool = False,
) -> Draw:  # fmt: skip
    """Return a drawing of a line for each of the series. band: draw intervals. many: points for the pointer only."""
    base = alt.Chart().encode(x, series)
    point: Any = "transparent" if many else alt.OverlayMarkDef(filled=True, size=38)
    line = base.mark_line(point=point).encode(y, tooltip=list(tooltip))
    layers = [*([interval_marks(base, y, band=True)] if band else []), line]
    key = str(y.shorthand).partition(":")[0]
    return lambda rows: drawn(layers, [row for row in rows if row.get(key) is not None], panel)


def points(x: Any, y: Any, series: str, tooltip: Sequence[alt.Tooltip]) -> Any:
    """Draw one point per row, with a colour and a shape for each of the series."""
    marks = colour(series), colour(series, channel=alt.Shape)
    return alt.Chart().mark_point().encode(x, y, *marks, tooltip=list(tooltip))


def heatmap(rows: Rows, x: Any, y: Any, value: tuple[str, str, str], tooltip: Sequence[alt.Tooltip]) -> list[Any]:
    """Draw cells coloured by a value (key, title, format), with their numbers if there is room."""
    key, title, form = value
    scale = alt.Scale(scheme="viridis", zero=False, nice=False)
    fill = alt.Color(f"{key}:Q", title=title, scale=scale, legend=alt.Legend(format=form))
    cells = alt.Chart().mark_rect().encode(x, y, fill, tooltip=list(tooltip))
    found = [row[key] for row in rows if row.get(key) is not None]
    if not found or len(rows) > MAX_CELL_LABELS:
        return [cells]
    # Viridis is dark below and bright above: the ink changes at the middle.
    middle = (min(found) + max(found)) / 2
    ink = alt.condition(f"datum[{key!r}] > {middle}", alt.value("#10141a"), alt.value("#ffffff"))
    return [cells, alt.Chart().mark_text(fontSize=11).encode(x, y, text=alt.Text(f"{key}:Q", format=form), color=ink)]


def cell_sizes(rows: Rows, x: str, y: str, width: int = 30) -> dict[str, Any]:
    """Return the sizes of a heatmap's panel, with cells of at least `width` pixels."""
    cell = max(width, min(48, (PANEL_WIDTH + 60) // count(rows, x)))
    return {"width": cell * count(rows, x), "height": BAR_HEIGHT * count(rows, y)}


DISCARDED = x_number("discard_rate", "discarded tokens per token", ".2f", zero=True)
VERIFIED = y_number("verification_rate", "target calls per token", ".2f")
RATES = tips("series", "setting", "head", discard_rate=".2f", verification_rate=".2f", tau=".2f", theory=".1f")
ENDS = alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])
DIAGONAL = alt.Chart(ENDS).mark_line(style="reference").encode(x="x:Q", y="y:Q")
SQUARE = 360  # pixels of a chart whose axes have one unit
ACCEPTED = "accepted, once the parent is"


def acceptance_by_position(rows: Rows) -> Any:
    """Draw EAGLE-2's figure 5."""
    x, y = x_number("accepted", ACCEPTED, ".0%", zero=True), names("position")
    shown = tips("mode", "position", "depth", "reached", accepted=".0%", low=".0%", high=".0%")
    intervals = interval_marks(alt.Chart().encode(y, alt.Stroke("mode:N", sort=None, legend=None)), x, along="x")
    return drawn([intervals, points(x, y, "mode", shown)], rows, height=BAR_HEIGHT * count(rows, "position"))


def acceptance_by_task(rows: Rows) -> Any:
    x = alt.X("position:N", title="position", sort=None, axis=alt.Axis(labelAngle=-45, grid=False, labelOverlap=False))
    shown = tips("mode", "task", "position", "reached", accepted=".0%")
    layers = heatmap(rows, x, names("task"), ("accepted", ACCEPTED, ".0%"), shown)
    return drawn(layers, rows, "mode", **cell_sizes(rows, "position", "task", width=36))


def acceptance_by_confidence(rows: Rows) -> Any:
    """Draw EAGLE-2's figure 6."""
    x = x_number("confidence", "confidence: the head's probability of the token", ".1f", unit=True)
    y = y_number("accepted", ACCEPTED, ".0%", unit=True)
    shown = tips("mode", "nodes", confidence=".2f", accepted=".0%", low=".0%", high=".0%")
    intervals = interval_marks(alt.Chart().encode(x, alt.Stroke("mode:N", sort=None, legend=None)), y)
    return drawn([DIAGONAL, intervals, points(x, y, "mode", shown)], rows, width=SQUARE, height=SQUARE)


def by_tree_size(key: str, title: str) -> Drawing:
    x = alt.X("nodes:O", title="nodes that the target scores", axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("depth:O", title="depth", sort="descending", axis=alt.Axis(grid=False))
    shown = tips("mode", "nodes", "depth", **{key: ".2f"})

    def draw(rows: Rows) -> Any:
        layers = heatmap(rows, x, y, (key, title, ".2f"), shown)
        return drawn(layers, rows, "mode", **cell_sizes(rows, "nodes", "depth"))

    return Drawing(f"{title} by nodes and depth", draw)


def reliability(rows: Rows) -> Any:
    """Draw predicted against observed probabilities, a point per bin of equal mass."""
    x = x_number("predicted", "predicted probability of acceptance", ".2f", unit=True)
    base = alt.Chart().encode(x, y_number("observed", "accepted", ".2f", unit=True), colour("predictor"))
    shown = tips("predictor", "scene", "count", predicted=".2f", observed=".2f")
    return drawn([DIAGONAL, base.mark_line(), base.mark_point().encode(tooltip=shown)], rows, "scene")


def by_position(key: str, title: str, form: str) -> Drawing:
    x, y = x_number("position", "place in the response", ".0%"), y_number(key, title, form, zero=True)
    shown = tips("method", "mode", "rounds", position=".0%", **{key: form}, low=form, high=form)
    return Drawing(f"{title} along a response", lines(x, y, colour("method"), shown, "mode", band=True))


def by_window(key: str, title: str, band: bool) -> Drawing:
    shown = tips("method", "mode", "k", **{key: ".2f"})
    y = y_number(key, title, ".2f")
    return Drawing(
        f"{title} by window", lines(x_number("k", "window k"), y, colour("method"), shown, "mode", band=band)
    )


def by_depth(key: str) -> Drawing:
    x, y = x_number("depth", "place in the draft", "d"), y_number(key, key.upper(), ".3f")
    shown = tips("predictor", "scene", "depth", "tokens", **{key: ".3f"})
    return Drawing(f"{key.upper()} by place in the draft", lines(x, y, colour("predictor"), shown, "scene"))


DEPTH = alt.X("depth:O", title="residual blocks D", axis=alt.Axis(labelAngle=0, grid=False))
NODES = x_number("nodes", "nodes that the target scores", log=True)
SPEEDUP = y_number("speedup", "speed-up over ar", ".2f")
DRAWINGS = {
    "specdecpp-rates": Drawing(
        "Verification against discard rate (SpecDec++, figure 4)",
        lines(DISCARDED, VERIFIED, colour("series"), RATES),
        "Lower left is better. The front takes the best of many settings on these very prompts: it flatters the heads.",
    ),
    "specdecpp-kl-depth": Drawing(
        "Eval KL by depth",
        lines(DEPTH, y_number("kl", "eval KL, nats", ".2f"), colour("series"), tips("series", "depth", kl=".3f")),
    ),
    "eagle2-acceptance-by-position": Drawing("Acceptance by position in the static tree", acceptance_by_position),
    "eagle2-acceptance-by-task": Drawing("Acceptance by position and task", acceptance_by_task),
    "eagle2-acceptance-by-confidence": Drawing("Acceptance by the head's confidence", acceptance_by_confidence),
    "eagle2-tau-by-size": by_tree_size("tau", "Tokens per target call"),
    "eagle2-predicted-speed": by_tree_size("speedup", "Predicted speed-up"),
    "eagle2-speed-by-size": Drawing(
        "Measured speed-up by nodes and depth",
        lines(NODES, SPEEDUP, colour("depth"), tips("mode", "depth", "nodes", speedup=".2f"), "mode", band=True),
    ),
    "hsddw-window-sensitivity": by_window("speedup", "Speed-up over ar", band=True),
    "hsddw-tau-by-window": by_window("tau", "Tokens per target call", band=False),
    "hsddw-entropy-density": Drawing(
        "Entropy of accepted and rejected tokens",
        lines(
            x_number("entropy", "entropy [nats]", ".1f", zero=True),
            y_number("share", "share of tokens in 0.25 nats", ".0%", zero=True), colour("verdict"),
            tips("verdict", "panel", "tokens", entropy=".2f", share=".1%"), "panel", many=True,
        ),
    ),
    "hsddw-windows": Drawing(
        "Windows of single responses",
        lines(
            x_number("round", "round"), y_number("drafted", "tokens handed to the target", zero=True),
            colour("method"), tips("method", "panel", "round", "drafted", "accepted", threshold=".2f"), "panel",
            many=True,
        ),
    ),
    "hsddw-window-by-position": by_position("drafted", "Mean window", ".1f"),
    "hsddw-threshold-by-position": by_position("threshold", "Mean entropy threshold", ".2f"),
    "stop-rules-gain": Drawing(
        "Gain over the best fixed K by the cost of a drafted token",
        lines(
            x_number("c", "c of a drafted token", ".2f"), y_number("gain", "gain in tokens by time", "+.0%"),
            colour("policy"), tips("policy", "scene", "setting", c=".3g", gain="+.1%"), "scene", band=True,
        ),
    ),
    "stop-rules-reliability": Drawing("Reliability of the probabilities", reliability),
    "stop-rules-auc-by-depth": by_depth("auc"),
    "stop-rules-ece-by-depth": by_depth("ece"),
}  # fmt: skip


def draw_report(directory: Path) -> Path:
    """Write report.html beside the results.json of a script."""
    (run,) = read_runs([directory])
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    section = table_section(run.kind, run, DRAWINGS)
    write_text(directory / "report.html", render(f"Draftsmith, {run.kind}", date, [section]))
    return directory / "report.html"
