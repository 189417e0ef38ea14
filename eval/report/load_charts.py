"""Charts of runs under load: throughput against what a user sees, and speed over `ar` by users."""

from __future__ import annotations

from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import Drawing, Rows, colour, drawn, lines, tips, x_number, y_number

USER = x_number("user_tokens_per_s", "tokens/s of one user (1 / time per output token)", ",.0f", log=True)
ALL = y_number("tokens_per_s", "tokens/s of all users", ",.0f")


def throughput(rows: Rows) -> Any:
    """A line a method, its points in the order of users; a cross where it stops paying."""
    shown = tips("method", users=".3g", user_tokens_per_s=",.1f", tokens_per_s=",.1f", speedup=".2f")
    base = alt.Chart().encode(USER, ALL, colour("method"), tooltip=shown)
    measured = base.transform_filter("!isValid(datum.stops)")
    line = measured.mark_line(point=alt.OverlayMarkDef(filled=True, size=38)).encode(order=alt.Order("users:Q"))
    users = measured.mark_text(dy=-10, fontSize=10).encode(text=alt.Text("users:Q", format="~g"))
    ends = base.transform_filter("isValid(datum.stops)")
    cross = ends.mark_point(shape="cross", size=190, angle=45, filled=True, opacity=1)
    said = ends.mark_text(align="left", dx=12, dy=4, fontWeight=600).encode(text="stops:N")
    return drawn([line, users, cross, said], rows)


def speedup(rows: Rows) -> Any:
    users = sorted({row["users"] for row in rows})
    x = alt.X("users:Q", title="users", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=users, format="~g"))
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(style="reference").encode(y="one:Q")
    shown = tips("method", users="~g", speedup=".2f", low=".2f", high=".2f")
    return lines(x, y_number("speedup", "speed over ar", ".2f"), colour("method"), shown, band=True, over=[one])(rows)


LOAD = {
    "load-throughput": Drawing(
        "Throughput against what a user sees", throughput,
        "Upper right is better. Numbers are users at the same time; a cross is where the method's throughput falls "
        "below ar's at the same number of users.",
    ),
    "load-speedup": Drawing(
        "Speed over ar by users", speedup,
        "Below 1 speculation does not pay. Intervals are 95 %, by bootstrap over prompts in pairs.",
    ),
}  # fmt: skip
