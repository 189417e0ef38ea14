"""Parts of the report's charts, drawn by Altair.

Colors and fonts are in `themes.py`, so one specification serves both themes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[[Rows], Any]  # rows to an Altair chart
PANEL = "temperature"  # key of the rows that a chart shows apart
PANEL_WIDTH, PANEL_HEIGHT, PANEL_COLUMNS = 230, 200, 3
HEIGHT, BAR_HEIGHT = 320, 27
# Keys of rows and their names in charts.
WORDS = {"speedup": "speed-up", "tau": "τ", "low": "from", "high": "to", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True)
class Drawing:
    """Drawing of a table's rows."""

    title: str
    draw: Draw
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        name: without blanks.
        specification: for Vega-Lite, a single panel without a width; None if there is nothing to draw.
    """

    name: str
    title: str
    note: str
    specification: Mapping[str, Any] | None


def chart(name: str, drawing: Drawing, rows: Rows) -> Chart:
    """Draw rows, with the sizes by which the page fits the chart to its width."""
    if not rows:
        return Chart(name, drawing.title, drawing.note, None)
    about = f"{drawing.title}. {drawing.note}".strip()
    specification = drawing.draw(rows).properties(description=about).to_dict()
    layers = specification.get("spec", specification).get("layer", ())
    panel = specification.get("facet", {}).get("field", PANEL)

    def longest(channel: str, least: int) -> int:
        channels = [layer["encoding"].get(channel, {}) for layer in layers]
        keys = {one["field"] for one in channels if one.get("type") == "nominal"}
        return max((len(str(row.get(key))) for row in rows for key in keys), default=least)

    # Characters of the longest entry of the legend, and of the longest name along y.
    sizes = {"panels": count(rows, panel), "entry": longest("color", 0), "names": longest("y", 6)}
    return Chart(name, drawing.title, drawing.note, {**specification, "usermeta": sizes})


def count(rows: Rows, key: str) -> int:
    """Count the different values under `key`."""
    return len({row.get(key) for row in rows})


def drawn(layers: Sequence[Any], rows: Rows, panel: str = PANEL, **sizes: Any) -> Any:
    """Stack layers in one panel of the page's width, or in one for each of several values of `panel`."""
    data = alt.Data(values=[dict(row) for row in rows])
    num_panels = count(rows, panel)
    if num_panels == 1:
        return alt.layer(*layers, data=data).properties(**{"height": HEIGHT, **sizes})
    facet = alt.Facet(f"{panel}:N", header=alt.Header(title=None, labelLimit=PANEL_WIDTH), sort=None)
    one = alt.layer(*layers).properties(**{"width": PANEL_WIDTH, "height": PANEL_HEIGHT, **sizes})
    return one.facet(facet=facet, data=data, columns=2 if num_panels in (2, 4) else PANEL_COLUMNS)


def number(channel: Any, key: str, title: str, form: str = "", zero: bool = False) -> Any:
    """Return a quantitative x or y.

    Args:
        form: d3 format of the numbers.
        zero: begin at 0; otherwise the axis is padded, so that no mark lies on the edge.
    """
    scale = alt.Scale(zero=True) if zero else alt.Scale(zero=False, padding=10)
    axis = alt.Axis(tickCount=6, format=form) if form else alt.Axis(tickCount=6)
    return channel(f"{key}:Q", title=title, scale=scale, axis=axis)


x_number, y_number = partial(number, alt.X), partial(number, alt.Y)


def color(key: str, title: str = "", channel: Any = alt.Color) -> Any:
    """Return a color, or a shape, for each name under `key`."""
    return channel(f"{key}:N", title=title or key, sort=None)


def tips(*shown: str, **formats: str) -> list[alt.Tooltip]:
    """Return tooltips: keys as they are, and numbers with their d3 formats."""

    def title(key: str) -> str:
        return WORDS.get(key, key.replace("_", " "))

    named = [alt.Tooltip(f"{key}:N", title=title(key)) for key in shown]
    return [*named, *(alt.Tooltip(f"{key}:Q", title=title(key), format=form) for key, form in formats.items())]
