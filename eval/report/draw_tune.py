"""Charts of `draftsmith eval tune`."""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import BAR_HEIGHT, Drawing, Rows, colour, lines, names, quantitative, single, tips

HIGHEST = "Each line's highest point is the length that pays best on this machine."


def draw_by_length(rows: Rows, title: str) -> Any:
    x, y = alt.X("length:Q", **quantitative(title)), alt.Y("tokens_per_s:Q", **quantitative("tokens/s", ",.0f"))
    tooltip = tips("family", "setting", "length", tau=".2f", tokens_per_s=",.1f")
    return single(lines(x, y, colour("family"), tooltip), rows)


def target_cost(rows: Rows) -> Any:
    x, y = (
        alt.X("rows:Q", **quantitative("rows read")),
        alt.Y("milliseconds:Q", **quantitative("milliseconds", ".2f", zero=True)),
    )
    return single(lines(x, y, colour("kind", "rows form a"), tips("kind", "rows", milliseconds=".2f")), rows)


def draw_draft_cost(rows: Rows) -> Any:
    bars = alt.Chart().mark_bar(cornerRadiusEnd=2).encode(
        alt.X("milliseconds:Q", **quantitative("milliseconds", ".2f", zero=True)),
        alt.Y("drafter:N", **names(scale=alt.Scale(paddingInner=0.3))),
        alt.YOffset("step:N", sort=None), colour("step"),
        tooltip=tips("drafter", "step", milliseconds=".2f"),
    )  # fmt: skip
    return single([bars], rows, height=(BAR_HEIGHT + 9) * len({row.get("drafter") for row in rows}))


DRAWINGS = {
    "predicted-by-k": Drawing(
        "Predicted speed by drafted tokens a round", partial(draw_by_length, title="drafted tokens K"), HIGHEST
    ),
    "predicted-by-nodes": Drawing(
        "Predicted speed by the size of the tree", partial(draw_by_length, title="nodes"), HIGHEST
    ),
    "target-cost": Drawing(
        "What one target call costs by the rows it reads", target_cost,
        "The flatter the line, the more drafted tokens pay. Medians of calls behind kept tokens.",
    ),
    "draft-cost": Drawing(
        "What a step of each drafter costs", draw_draft_cost,
        "A step drafts one token of a chain, or one level of a tree of so many nodes a level.",
    ),
}  # fmt: skip
