"""Tables of a study: as results.json keeps them, and as Markdown and CSV show them."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.data.heads.markdown import markdown_lines
from draftsmith.data.tables import Column, Row, Table, plain, text_cells


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
