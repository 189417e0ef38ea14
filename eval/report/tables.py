"""Tables of `eval/report/figures.py` as cells, and as the files a paper takes: Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence
from typing import Any

from draftsmith.data.heads.markdown import markdown_lines
from draftsmith.eval.report.figures import Column, Table, formatted


def cells(table: Table) -> list[list[str]]:
    """Every row as text, in the order of the columns."""
    return [[formatted(row.get(column.key), column.format) for column in table.columns] for row in table.rows]


def groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """The headings above the headings, as (heading, columns that it spans); empty when no column has one."""
    if not any(column.group for column in columns):
        return []
    return [(name, len(list(members))) for name, members in itertools.groupby(columns, lambda column: column.group)]


def is_number(table: Table, key: str) -> bool:
    """Whether a column is aligned as numbers: whatever it holds besides nothing is one, or looks like one."""
    values = [row.get(key) for row in table.rows if row.get(key) not in (None, "")]
    return bool(values) and all(_looks_like_one(value) for value in values)


def _looks_like_one(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())


def headings(table: Table) -> list[str]:
    """One heading a column, its group before it: for forms that have one row of them."""
    return [f"{column.group}: {column.title}" if column.group else column.title for column in table.columns]


def markdown(table: Table) -> str:
    rows = [[cell.replace("\n", " ") for cell in row] for row in cells(table)]
    lines = [f"**{table.title}**", "", *markdown_lines(headings(table), rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def comma_separated(table: Table) -> str:
    """The values as they are, unrounded, under the keys."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows([row.get(column.key) for column in table.columns] for row in table.rows)
    return out.getvalue()


def latex(table: Table) -> str:
    """A `tabular` for the booktabs package; title and note are comments, as captions are the paper's own words."""
    import pandas as pd

    frame = pd.DataFrame(cells(table), columns=range(len(table.columns)), dtype=str)
    if groups(table.columns):
        frame.columns = pd.MultiIndex.from_tuples([(column.group, column.title) for column in table.columns])
    else:
        frame.columns = pd.Index([column.title for column in table.columns])
    style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    aligned = "".join("r" if is_number(table, column.key) else "l" for column in table.columns)
    text = style.to_latex(hrules=True, column_format=aligned, multicol_align="c")
    about = "".join(f"% {' '.join(part.split())}\n" for part in (table.title, table.note) if part)
    return about + text
