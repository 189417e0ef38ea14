"""Tables: rows under headings, as results hold them; how they are printed says `data/console.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class Column:
    """One column of a table.

    key: of its values in the rows. title: its heading. format: of its numbers, `format()`'s; `x` behind it is kept:
    `.2fx` writes 1.84x, and `>` only puts texts to the right, as numbers. group: a heading above this one, over all
    neighbours that share it. below: on the screen it stands below the column before it.
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


def of_cells(name: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> Table:
    """A table of rows whose cells stand in the order of the headings, which are their keys, each once. right: headings
    of numbers."""
    columns = [Column(heading, heading, ">" if heading in right else "") for heading in headings]
    return Table(name, columns=columns, rows=[dict(zip(headings, row, strict=True)) for row in rows])


def plain(value: Any) -> Any:
    """A value as JSON holds it: rounded numbers, None where there is none (NaN), in mappings and lists alike."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if not isinstance(value, float) and hasattr(value, "item"):  # a scalar of NumPy
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
