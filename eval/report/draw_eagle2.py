"""Charts of `draftsmith eval eagle2`."""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    SQUARE,
    UNIT,
    Drawing,
    Rows,
    cell_sizes,
    colour,
    counted,
    diagonal,
    heatmap,
    interval_marks,
    lines,
    names,
    panels,
    quantitative,
    single,
    tips,
)

ACCEPTED = "accepted, once the parent is"


def draw_by_position(rows: Rows) -> Any:
    """Figure 5."""
    x, y = alt.X("accepted:Q", **quantitative(ACCEPTED, ".0%", zero=True)), alt.Y("position:N", **names())
    tooltip = tips("mode", "position", "depth", "reached", accepted=".0%", low=".0%", high=".0%")
    base = alt.Chart().encode(y, colour("mode"))
    points = base.mark_point().encode(x, colour("mode", channel=alt.Shape), tooltip=tooltip)
    height = BAR_HEIGHT * len({row.get("position") for row in rows})
    return single([interval_marks(base, x, along="x"), points], rows, height=height)


def draw_by_context(rows: Rows) -> Any:
    """Figure 5, context by context."""
    x = alt.X("position:N", title="position", sort=None, axis=alt.Axis(labelAngle=-45, grid=False, labelOverlap=False))
    tooltip = tips("mode", "task", "position", "reached", accepted=".0%")
    layers = heatmap(rows, x, alt.Y("task:N", **names()), ("accepted", ACCEPTED, ".0%"), tooltip)
    return panels(layers, rows, "mode", **cell_sizes(rows, "position", "task", width=36))


def draw_by_confidence(rows: Rows) -> Any:
    """Figure 6."""
    x = alt.X(
        "confidence:Q", **{**quantitative("confidence: the head's probability of the token", ".1f"), "scale": UNIT}
    )
    y = alt.Y("accepted:Q", **{**quantitative(ACCEPTED, ".0%"), "scale": UNIT})
    tooltip = tips("mode", "nodes", confidence=".2f", accepted=".0%", low=".0%", high=".0%")
    base = alt.Chart().encode(x, colour("mode"))
    points = base.mark_point().encode(y, counted("nodes"), colour("mode", channel=alt.Shape), tooltip=tooltip)
    return single([diagonal(), interval_marks(base, y), points], rows, width=SQUARE, height=SQUARE)


def by_size(rows: Rows, value: tuple[str, str, str]) -> Any:
    """Cells of nodes and depth."""
    x = alt.X("nodes:O", title="nodes that the target scores", axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("depth:O", title="depth", sort="descending", axis=alt.Axis(grid=False))
    layers = heatmap(rows, x, y, value, tips("mode", "nodes", "depth", **{value[0]: value[2]}))
    return panels(layers, rows, "mode", **cell_sizes(rows, "nodes", "depth"))


def measured_speed(rows: Rows) -> Any:
    x = alt.X("nodes:Q", **quantitative("nodes that the target scores", log=True))
    y = alt.Y("speedup:Q", **quantitative("speed-up over autoregressive decoding", ".2f"))
    tooltip = tips("mode", "depth", "nodes", speedup=".2f", low=".2f", high=".2f", tau=".2f")
    return panels(lines(x, y, colour("depth"), tooltip, band=True), rows, "mode")


DRAWINGS = {
    "eagle2-acceptance-by-position": Drawing(
        "Acceptance by position in the static tree ({tree})", draw_by_position,
        "A position is the ranks on the path from the root, 0 the most probable. Bars span the middle half of the "
        "prompts: where they are long, acceptance depends on context, which a static tree cannot follow (figure 5 of "
        "the paper).",
    ),
    "eagle2-acceptance-by-task": Drawing(
        "Acceptance by position and task ({tree})", draw_by_context,
        "Down a column the position is the same and the context is not. Positions that a task reached fewer than 5 "
        "times are left out.",
    ),
    "eagle2-acceptance-by-confidence": Drawing(
        "Acceptance against the head's confidence", draw_by_confidence,
        "On the diagonal confidence is acceptance, which EAGLE-2 builds its trees on (figure 6 of the paper).",
    ),
    "eagle2-tau-by-size": Drawing(
        "Tokens per target call by nodes and depth", partial(by_size, value=("tau", "tau", ".2f")),
        "From one recording of the largest trees: every size's rounds are read off it, without decoding again.",
    ),
    "eagle2-speed-by-size": Drawing(
        "Measured speed-up by nodes and depth", measured_speed,
        "More nodes accept more and cost more: the best number is where the target still scores another row for "
        "little.",
    ),
    "eagle2-predicted-speed": Drawing(
        "Predicted speed-up by nodes and depth", partial(by_size, value=("speedup", "speed-up", ".2f")),
        "Replayed counts, priced by a regression over the measured sizes (seconds a target call, a drafted token, a "
        "forward of the head); the table says how far it is off where it was not fitted.",
    ),
}  # fmt: skip
