"""Parts of the report's charts, drawn by Altair.

Colours and fonts are in `themes.py`, so one specification serves both themes, the page, PNG and SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[[Rows], Any]  # rows to an Altair chart
MAX_CELL_LABELS = 260  # numbers in a heatmap, above which they are left out
PANEL_WIDTH, PANEL_HEIGHT, PANEL_COLUMNS = 230, 200, 3
HEIGHT, BAR_HEIGHT = 320, 27
# Keys of rows and their names in charts.
WORDS = {"speedup": "speed-up", "tau": "τ", "low": "from", "high": "to", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True)
class Drawing:
    """Drawing of a table's rows; title and note may contain the run's settings, as `{tree}`."""

    title: str
    draw: Draw
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        name: file name, without blanks.
        specification: for Vega-Lite, a single panel without a width; None if there is nothing to draw.
    """

    name: str
    title: str
    note: str
    specification: Mapping[str, Any] | None


def chart(name: str, drawing: Drawing, rows: Rows, settings: Mapping[str, Any] | None = None) -> Chart:
    """Draw rows; settings: those of the run, for title and note."""
    title, note = (text.format_map(settings or {}) for text in (drawing.title, drawing.note))
    if not rows:
        return Chart(name, title, note, None)
    found = drawing.draw(rows).properties(description=f"{title}. {note}".strip()).to_dict()
    return Chart(name, title, note, {**found, "usermeta": room(found)})


def room(specification: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes by which the page fits a chart to its width.

    These are the number of panels, the characters of the longest legend entry and of the longest name along y, and
    the columns of a heatmap.
    """
    rows = specification["data"]["values"]
    layers = specification.get("spec", specification).get("layer", ())
    panel = specification.get("facet", {}).get("field")

    def named(channel: str) -> set[str]:
        channels = [layer["encoding"].get(channel, {}) for layer in layers]
        keys = {one["field"] for one in channels if one.get("type") in ("nominal", "ordinal")}
        return {str(row.get(key)) for row in rows for key in keys}

    entry, names = (max(map(len, named(channel)), default=least) for channel, least in (("color", 0), ("y", 6)))
    panels, cells = count(rows, panel) if panel else 1, max(1, len(named("x")))
    return {"panels": panels, "entry": entry, "names": names, "cells": cells}


def count(rows: Rows, key: str) -> int:
    """Count the different values under `key`."""
    return len({row.get(key) for row in rows})


def drawn(layers: Sequence[Any], rows: Rows, panel: str | None = None, **sizes: Any) -> Any:
    """Stack layers in one panel of the page's width, or in one for each value of `panel`, in the order of the rows."""
    data = alt.Data(values=[dict(row) for row in rows])
    if panel is None:
        return alt.layer(*layers, data=data).properties(**{"height": HEIGHT, **sizes})
    facet = alt.Facet(f"{panel}:N", header=alt.Header(title=None, labelLimit=PANEL_WIDTH), sort=None)
    one = alt.layer(*layers).properties(**{"width": PANEL_WIDTH, "height": PANEL_HEIGHT, **sizes})
    return one.facet(facet=facet, data=data, columns=2 if count(rows, panel) in (2, 4) else PANEL_COLUMNS)


def number(
    channel: Any, key: str, title: str, form: str = "", zero: bool = False, log: bool = False, unit: bool = False
) -> Any:
    """Return a quantitative x or y.

    Args:
        form: d3 format of the numbers.
        zero: begin at 0; otherwise the axis is padded, so that no mark lies on the edge.
        unit: from 0 to 1.
    """
    scale = alt.Scale(zero=True) if zero else alt.Scale(zero=False, padding=10)
    scale = alt.Scale(type="log", padding=10) if log else alt.Scale(domain=[0, 1]) if unit else scale
    axis = alt.Axis(tickCount=6, format=form) if form else alt.Axis(tickCount=6)
    return channel(f"{key}:Q", title=title, scale=scale, axis=axis)


x_number, y_number = partial(number, alt.X), partial(number, alt.Y)


def names(key: str, **more: Any) -> Any:
    """Return names along y, in the order of the rows, all of them and without a title."""
    return alt.Y(f"{key}:N", title=None, sort=None, axis=alt.Axis(grid=False, labelOverlap=False), **more)


def colour(key: str, title: str = "", channel: Any = alt.Color) -> Any:
    """Return a colour, or a shape, for each name under `key`."""
    return channel(f"{key}:N", title=title or key, sort=None)


def tips(*shown: str, **formats: str) -> list[alt.Tooltip]:
    """Return tooltips: keys as they are, and numbers with their d3 formats."""
    found = [alt.Tooltip(f"{key}:N", title=word(key)) for key in shown]
    return [*found, *(alt.Tooltip(f"{key}:Q", title=word(key), format=form) for key, form in formats.items())]


def word(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))


def interval_marks(base: Any, across: Any, band: bool = False, along: str = "y") -> Any:
    """Mark intervals from `low` to `high` on the channel `across`: a band around a line, or a rule."""
    both = base.transform_filter("isValid(datum.low) && isValid(datum.high)")
    marked = both.mark_area(style="band") if band else both.mark_rule(style="interval")
    start, end = (alt.Y, alt.Y2) if along == "y" else (alt.X, alt.X2)
    low = start("low:Q", **{key: across[key] for key in ("title", "scale", "axis")})
    return marked.encode(**{along: low, f"{along}2": end("high:Q")})


def lines(
    x: Any, y: Any, series: Any, tooltip: Sequence[alt.Tooltip], panel: str | None = None, *, band: bool = False,
    many: bool = False, over: Sequence[Any] = (),
) -> Draw:  # fmt: skip
    """Return a drawing of a line for each of the series; rows without y are skipped.

    Args:
        band: draw intervals from `low` to `high`.
        many: draw points for the pointer only.
        over: further layers.
    """
    base = alt.Chart().encode(x, series)
    point: Any = "transparent" if many else alt.OverlayMarkDef(filled=True, size=38)
    line = base.mark_line(point=point).encode(y, tooltip=list(tooltip))
    layers = [*([interval_marks(base, y, band=True)] if band else []), line, *over]
    key = str(y.shorthand).partition(":")[0]
    return lambda rows: drawn(layers, [row for row in rows if row.get(key) is not None], panel)


def points(x: Any, y: Any, series: str, tooltip: Sequence[alt.Tooltip], legend: str = "", **size: Any) -> Any:
    """Draw one point per row, with a colour and a shape for each of the series."""
    marks = colour(series, legend), colour(series, legend, alt.Shape)
    return alt.Chart().mark_point().encode(x, y, *marks, **size, tooltip=list(tooltip))


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
    return {"width": alt.Step(cell), "height": BAR_HEIGHT * count(rows, y)}
