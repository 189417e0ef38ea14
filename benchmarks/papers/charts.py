"""Charts of the papers' scripts, drawn into OUTPUT/report.html."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import altair as alt

from draftsmith.data.store.files import write_text
from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    Drawing,
    Rows,
    cell_sizes,
    colour,
    count,
    drawn,
    heatmap,
    interval_marks,
    lines,
    names,
    points,
    tips,
    x_number,
    y_number,
)
from draftsmith.eval.report.page import render
from draftsmith.eval.report.runs import read_runs
from draftsmith.eval.report.sections import table_section

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
