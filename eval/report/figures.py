"""What a study found, as tables and charts that say nothing of how they are drawn: they travel in results.json, and
`draftsmith eval report` draws them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Row = Mapping[str, Any]
SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class Column:
    """One column of a table: the key of its values in the rows, its heading, and the format of its numbers
    (`format()`'s; `x` behind it is kept: `.2fx` writes 1.84x). Missing values and None are empty cells. group: a
    heading above this one, over all neighbours that share it."""

    key: str
    title: str
    format: str = ""
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under headings. name: a file's name, without blanks. note: what a reader must know to judge it."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Axis:
    """What is along one direction of a chart. format: of its numbers, as d3 and Python both understand it (`.2f`,
    `.0%`). zero: the scale begins at zero."""

    key: str
    title: str
    format: str = ""
    scale: Literal["linear", "log", "ordinal"] = "linear"
    zero: bool = False


@dataclass(frozen=True)
class Chart:
    """Rows as marks.

    mark: `line` joins the rows of a series in the order of x; `point` does not; `bar` groups series side by side;
        `heatmap` colours the cells of x and y by `color`.
    series: key that tells rows of one colour apart. facet: key that gives each of its values a panel of its own.
    low, high: keys of the ends of an interval around y. size: key of a count, drawn as a point's area.
    color: key that a heatmap is coloured by, with `color_title` and `color_format`.
    diagonal: draw y = x, where both are probabilities. label: key of a text beside each point.
    hover: more keys, shown with the values under the pointer.
    """

    name: str
    title: str
    mark: Literal["line", "point", "bar", "heatmap"]
    rows: Sequence[Row]
    x: Axis
    y: Axis
    series: str | None = None
    series_title: str = ""
    facet: str | None = None
    low: str | None = None
    high: str | None = None
    size: str | None = None
    color: str | None = None
    color_title: str = ""
    color_format: str = ""
    diagonal: bool = False
    label: str | None = None
    hover: Sequence[str] = ()
    note: str = ""


Figure = Table | Chart


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """As results.json holds them."""
    return [{"type": type(figure).__name__.lower(), **dataclasses.asdict(figure)} for figure in figures]


def from_json(raw: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """What `to_json` wrote."""
    return [_figure(dict(item)) for item in raw]


def _figure(item: dict[str, Any]) -> Figure:
    if item.pop("type") == "table":
        return Table(**{**item, "columns": [Column(**column) for column in item["columns"]]})
    return Chart(**{**item, "x": Axis(**item["x"]), "y": Axis(**item["y"])})


def plain(value: Any) -> Any:
    """As JSON holds it: rounded numbers, None where there is none (NaN), in mappings and lists alike."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value


def formatted(value: Any, form: str) -> str:
    """One value as text; None is empty, and so is NaN."""
    if value is None or value != value:
        return ""
    if isinstance(value, str | bool) or not form:
        return str(value)
    return format(value, form[:-1]) + "x" if form.endswith("x") else format(value, form)
