"""Charts of benchmarks, and of two methods against each other prompt by prompt."""

from __future__ import annotations

from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    SQUARE,
    Drawing,
    Rows,
    cell_sizes,
    colour,
    heatmap,
    interval_marks,
    names,
    panels,
    quantitative,
    single,
    tips,
    values,
)


def panelled(layers: list[Any], rows: Rows, **sizes: Any) -> Any:
    """A panel for each temperature where there are several."""
    if len({row.get("temperature") for row in rows}) > 1:
        return panels(layers, rows, "temperature", **sizes)
    return single(layers, rows, **sizes)


def draw_speedup(rows: Rows) -> Any:
    x, y = (
        alt.X("speedup:Q", **quantitative("speed-up", ".2f", zero=True)),
        alt.Y("method:N", **names(scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15))),
    )
    tooltip = tips(
        "method", "temperature", "prompts", speedup=".2f", low=".2f", high=".2f", tau=".2f", tokens_per_s=".1f"
    )
    bars = alt.Chart().mark_bar(cornerRadiusEnd=2).encode(x, y, tooltip=tooltip)
    layers = [bars, interval_marks(alt.Chart().encode(y), x, along="x")]  # a bar would hide half of its interval
    return panelled(layers, rows, height=BAR_HEIGHT * len({row.get("method") for row in rows}))


def tau_and_speedup(rows: Rows) -> Any:
    points = alt.Chart().mark_point().encode(
        alt.X("tau:Q", **quantitative("τ, emitted tokens per target call", ".2f")),
        alt.Y("speedup:Q", **quantitative("speed-up", ".2f")),
        colour("method"), colour("method", channel=alt.Shape),
        tooltip=tips("method", "temperature", tau=".2f", speedup=".2f", tokens_per_s=".1f"),
    )  # fmt: skip
    return panelled([points], rows)


def draw_by_task(rows: Rows, key: str, title: str) -> Any:
    x = alt.X("task:N", title="task", sort=None, axis=alt.Axis(labelAngle=-35, grid=False, labelOverlap=False))
    tooltip = tips("method", "task", "temperature", "prompts", **{key: ".2f"})
    layers = heatmap(rows, x, alt.Y("method:N", **names()), (key, title, ".2f"), tooltip)
    sizes = cell_sizes(rows, "task", "method")
    several = len({row.get("temperature") for row in rows}) > 1
    return panelled(layers, rows, **(sizes if several else {"height": sizes["height"]}))


DRAWINGS = {
    "speedup": Drawing(
        "Speed-up by method", draw_speedup,
        "Bars over all prompts, with 95 % bootstrap intervals; 1 is autoregressive decoding.",
    ),
    "tau-and-speedup": Drawing(
        "What τ is worth", tau_and_speedup,
        "A method far to the right and low emits many tokens a call, and pays for them with its drafts.",
    ),
    "speedup-by-task": Drawing(
        "Speed-up by task", lambda rows: draw_by_task(rows, "speedup", "speed-up"),
        "A cell is a ratio of sums over the prompts of one task; bright is better.",
    ),
    "tau-by-task": Drawing(
        "τ by task", lambda rows: draw_by_task(rows, "tau", "τ"),
        "A cell is a ratio of sums over the prompts of one task; bright is better.",
    ),
}  # fmt: skip


def against(rows: Rows) -> Any:
    """Two methods prompt by prompt, chosen by the reader: `rows` have method, prompt, task and tokens_per_s.

    A prompt above the diagonal is faster by the method along y.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    first = methods[0]
    last = max(methods[1:], key=lambda method: sum(row["tokens_per_s"] for row in rows if row["method"] == method))
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
    drawn = alt.layer(points, diagonal, data=values(rows)).add_params(*choose)
    return drawn.properties(width=SQUARE + 60, height=SQUARE)
