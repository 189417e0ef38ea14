"""Tables: rows under headings, as results.json keeps them, and as screen, page, Markdown, CSV and LaTeX show them."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table as Printed

from draftsmith.data.heads.markdown import markdown_lines

Row = Mapping[str, Any]
SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class Column:
    """One column of a table.

    key: of its values in the rows. title: its heading. format: of its numbers, `format()`'s; `x` behind it is kept:
    `.2fx` writes 1.84x. group: a heading above this one, over all neighbours that share it. below: on the screen it
    stands below the column before it.
    """

    key: str
    title: str
    format: str = ""
    group: str = ""
    below: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings; None and missing values are empty cells.

    name: a file's name, without blanks. columns: none where the rows are there to be drawn. note: what a reader must
    know to read the table.
    """

    name: str
    title: str = ""
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    note: str = ""


def drawn_data(name: str, rows: Iterable[Row]) -> Table:
    """A table whose rows only a chart shows (`eval/report/study_charts.py`)."""
    return Table(name, rows=plain(list(rows)))


def to_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Tables as results.json holds them."""
    return [{key: value for key, value in dataclasses.asdict(table).items() if value} for table in tables]


def from_json(results: Row) -> list[Table]:
    """The tables of a study's results.json. Earlier versions kept `figures`: tables, and charts with how they are
    drawn, whose names and rows are those of today's."""
    return [
        Table(
            item["name"], item.get("title", ""), [Column(**column) for column in item.get("columns", ())],
            item.get("rows", ()), item.get("note", ""),
        )
        for item in results.get("tables") or results.get("figures") or ()
    ]  # fmt: skip


def plain(value: Any) -> Any:
    """A value as JSON holds it: rounded numbers, None where there is none (NaN), in mappings and lists alike."""
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


def interval(ends: Sequence[float | None] | None, form: str = ".2f", between: str = "-") -> str:
    """The ends of an interval as tables write it; empty where there is none."""
    low, high = ends or (None, None)
    return "" if low is None or low != low else f"{low:{form}}{between}{high:{form}}"


def text_cells(table: Table) -> list[list[str]]:
    """Every row as text, in the order of the columns."""
    return [[formatted(row.get(column.key), column.format) for column in table.columns] for row in table.rows]


def groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """The headings above the headings, as (heading, columns that it spans); empty when no column has one."""
    if not any(column.group for column in columns):
        return []
    return [(name, len(list(members))) for name, members in itertools.groupby(columns, lambda column: column.group)]


def numbers(table: Table) -> list[bool]:
    """For each column whether it is aligned as numbers: whatever it holds besides nothing is one, or looks like one."""

    def looks_like_one(value: Any) -> bool:
        return isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())

    values = ([row.get(column.key) for row in table.rows] for column in table.columns)
    known = ([value for value in column if value not in (None, "")] for column in values)
    return [bool(column) and all(map(looks_like_one, column)) for column in known]


def plain_table(**kwargs: Any) -> Printed:
    """An empty table of the screen, in this project's style."""
    return Printed(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **kwargs)


def on_screen(table: Table, bold: str = "", joint: str = "\n", first_width: int | None = None) -> Printed:
    """A table for a rich console, its note below it.

    bold: key that is true in rows to stand out. joint: between a value and that of the column `below` it.
    first_width: characters of the first column that are not given up in a narrow terminal.
    """
    shown = plain_table(
        title=table.title or None, title_justify="left", title_style="bold", caption=table.note, caption_justify="left"
    )
    stacks: list[list[int]] = []
    for number, column in enumerate(table.columns):
        if column.below:
            stacks[-1].append(number)
            continue
        stacks.append([number])
        least = first_width if number == 0 else None
        justify: Any = "right" if column.format else "left"
        shown.add_column(column.title, justify=justify, overflow="fold", min_width=least)
    for row, texts in zip(table.rows, text_cells(table), strict=True):
        joined = (joint.join(filter(None, (texts[number] for number in stack))) for stack in stacks)
        shown.add_row(*joined, style="bold" if bold and row.get(bold) else None)
    return shown


def markdown(table: Table) -> str:
    headings = [f"{column.group}: {column.title}" if column.group else column.title for column in table.columns]
    rows = [[cell.replace("\n", " ") for cell in row] for row in text_cells(table)]
    lines = [f"**{table.title}**", "", *markdown_lines(headings, rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def comma_separated(table: Table) -> str:
    """The values as they are, unrounded, under the keys."""
    out = io.StringIO()
    keys = [column.key for column in table.columns]
    writer = csv.DictWriter(out, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return out.getvalue()


def latex(table: Table) -> str:
    """A `tabular` for the booktabs package; title and note are comments, as captions are the paper's own words."""
    import pandas as pd

    grouped = bool(groups(table.columns))
    titles = [(column.group, column.title) if grouped else column.title for column in table.columns]
    frame = pd.DataFrame(text_cells(table), columns=range(len(titles)), dtype=str)
    frame.columns = pd.MultiIndex.from_tuples(titles) if grouped else pd.Index(titles)
    style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    aligned = "".join("r" if number else "l" for number in numbers(table))
    text = style.to_latex(hrules=True, column_format=aligned, multicol_align="c")
    about = "".join(f"% {' '.join(part.split())}\n" for part in (table.title, table.note) if part)
    return about + text
