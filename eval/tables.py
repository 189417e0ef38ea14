"""Tables of a run: as results.json keeps them, and as Markdown shows them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.data.console import Column, Row, Table, format_value, json_values, markdown_lines


def drawn_data(name: str, rows: Iterable[Row]) -> Table:
    """Return a table whose rows only a chart shows."""
    return Table(name, rows=json_values(list(rows)))


def to_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Tables as results.json holds them."""
    return [{key: value for key, value in dataclasses.asdict(table).items() if value} for table in tables]


def from_json(results: Row) -> list[Table]:
    """Return the tables of a run's results.json."""
    return [
        Table(
            item["name"], item.get("title", ""), [Column(**column) for column in item.get("columns", ())],
            item.get("rows", ()), item.get("note", ""),
        )
        for item in results.get("tables") or ()
    ]  # fmt: skip


def markdown(table: Table) -> str:
    headings = [f"{column.group}: {column.title}" if column.group else column.title for column in table.columns]
    rows = [
        [format_value(row.get(column.key), column.format).replace("\n", " ") for column in table.columns]
        for row in table.rows
    ]
    lines = [f"**{table.title}**", "", *markdown_lines(headings, rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def heading_groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return the upper headings as (heading, columns that it spans); empty if no column has one."""
    if not any(column.group for column in columns):
        return []
    return [(name, len(list(members))) for name, members in itertools.groupby(columns, lambda column: column.group)]
