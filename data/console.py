"""Console output of commands: results on stdout (text and tables, or one JSON document), notes and progress on stderr.

In a table that does not fit a terminal cells are folded, so that no name or number is cut. In a pipe or a file it has
its full width.

Control characters of names, replies and texts are printed as escapes, in logs too, which may be shown in a terminal
later. Data stay as they are: the values of the JSON document, and what `decode` answers into a pipe or a file.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from draftsmith.modules.types import without_controls

Row = Mapping[str, Any]
Advance = Callable[[float], None]

SIGNIFICANT_DIGITS = 5  # of floats in JSON
UNLIMITED = 10_000  # width of a pipe or a file
LOG_EVERY_S = 30  # seconds between progress lines in a log


@dataclass(frozen=True)
class Column:
    """One column of a table.

    key: name of the value in a row. title: heading. format: spec for `format()`; a final `x` is printed behind the
    number (`.2fx` gives 1.84x) and `>` only aligns text to the right. below: print the value in the cell of the column
    before.
    """

    key: str
    title: str
    format: str = ""
    below: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings; None and missing values are empty cells.

    name: identifier without blanks. columns: empty if the rows are only stored. note: printed below the table.
    """

    name: str
    title: str = ""
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    note: str = ""


def table_from_cells(
    name: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> Table:
    """Build a table from rows of cells in the order of the headings. right: headings of right-aligned columns."""
    columns = [Column(heading, heading, ">" if heading in right else "") for heading in headings]
    return Table(name, columns=columns, rows=[dict(zip(headings, row, strict=True)) for row in rows])


def json_values(value: Any) -> Any:
    """Convert nested values for JSON: floats are rounded, NaN and infinity become None, other objects their text."""
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    # NumPy scalars become Python numbers.
    if not isinstance(value, float) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def format_value(value: Any, form: str) -> str:
    """Format one cell; None and NaN are empty."""
    if value is None or value != value:
        return ""
    if isinstance(value, str | bool) or not form:
        return str(value)
    return format(value, form[:-1]) + "x" if form.endswith("x") else format(value, form)


def format_interval(ends: Sequence[float | None] | None, form: str = ".2f", between: str = "-") -> str:
    """Format the ends of an interval; empty if there is none."""
    low, high = ends or (None, None)
    return "" if low is None or low != low else f"{low:{form}}{between}{high:{form}}"


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def tables_to_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return tables as results.json holds them."""
    return [{key: value for key, value in asdict(table).items() if value} for table in tables]


def tables_from_json(results: Row) -> list[Table]:
    """Return the tables of a run's results.json."""
    return [
        Table(**{**item, "columns": [Column(**column) for column in item.get("columns", ())]})
        for item in results.get("tables") or ()
    ]


@dataclass
class _Output:
    """Output options of this process, and the results of its command (`results`), which --json prints."""

    quiet: bool = False
    as_json: bool = False
    document: dict[str, Any] | None = None


_output = _Output()


@contextmanager
def console_output(quiet: bool = False, as_json: bool = False) -> Iterator[Callable[..., str]]:
    """Apply output options inside the block; yields a function that returns the JSON document.

    quiet: no notes and no progress. as_json: collect results instead of printing them, and redirect any other print to
    stderr.
    """
    global _output
    before, _output = _output, _Output(quiet, as_json, {})
    output = _output

    def to_json(**values: Any) -> str:
        document = json_values(values | (output.document or {}))
        text = json.dumps(document, indent=2, ensure_ascii=False)
        # JSON may hold these as they are; a terminal obeys some of them.
        return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)

    make_record = logging.getLogRecordFactory()
    logging.setLogRecordFactory(SafeRecord)
    # A stdout without the letters of a text (LC_ALL=C, a pipe in ASCII) prints their codes.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # A library that prints must not spoil the document, which is all there is on stdout.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield to_json
    finally:
        _output = before
        logging.setLogRecordFactory(make_record)


class SafeConsole(Console):
    """Console that prints control characters in what it is given as escapes; its own, of colors and bars, remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


def print_text(text: str | Text) -> None:
    """Print result text on stdout."""
    if _output.document is not None:
        _output.document.setdefault("text", []).append(str(text).strip("\n"))
    if not _output.as_json:
        SafeConsole(soft_wrap=True, highlight=False, markup=False).print(text)


def log_note(text: str | Text) -> None:
    """Print a note on stderr, unless --quiet."""
    if not _output.quiet:
        SafeConsole(soft_wrap=True, highlight=False, markup=False, stderr=True).print(text)


DONE = "already_done"  # in the document of a command that had nothing to do


def log_done(command: str, output: object, measures: bool = False) -> None:
    """Note that a command has found its output finished, and mark its document so. As `done_line`."""
    add_result(**{DONE: True})
    log_note(done_line(command, output, measures))


def done_line(command: str, output: object, measures: bool) -> str:
    """Say that a command has nothing to do. measures: it has the option --again."""
    anew = "--again measures anew" if measures else "choose another --output or delete it"
    return f"already done: {command} in {output} ({anew})"


class SafeRecord(logging.LogRecord):
    """Log record, of a library too, whose control characters are escapes."""

    def getMessage(self) -> str:
        return without_controls(super().getMessage())


class _NoteHandler(logging.Handler):
    """Handler that prints what `modules/` logs as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        log_note(f"draftsmith: {record.getMessage()}")


_logger = logging.getLogger("draftsmith")
_logger.addHandler(_NoteHandler())
_logger.setLevel(logging.INFO)
_logger.propagate = False


def add_result(**values: Any) -> bool:
    """Add values to the JSON document. Return False without --json, where the caller prints them."""
    if _output.document is not None:
        _output.document |= values
    return _output.as_json


@contextmanager
def results() -> Iterator[dict[str, Any]]:
    """Collect what is printed inside the block in the dict that it yields, as --json prints it."""
    outer, collected = _output.document, dict[str, Any]()
    _output.document = collected
    try:
        yield collected
    finally:
        _output.document = None if outer is None else outer | collected


def print_table(table: Table, bold: str = "") -> None:
    """Print a result table on stdout. bold: key that is true in rows to highlight."""
    if not _output.as_json:
        draw_table(_stdout(), table, bold)
    if _output.document is None:
        return
    # The document holds values by their keys, not the printed text.
    keys = [column.key for column in table.columns]
    rows = [{key: row.get(key) for key in keys} for row in table.rows]
    values = {"name": table.name, "title": table.title, "rows": rows, "note": table.note}
    kept = {name: value for name, value in values.items() if value or name == "rows"}
    _output.document.setdefault("tables", []).append(kept)


def print_facts(facts: Mapping[str, Any], title: str = "", key: str = "facts") -> None:
    """Print names and values, one per line; None is a dash. key: name in the JSON document."""
    if add_result(**{key: dict(facts)}):
        return
    console = _stdout()
    if title:
        console.print(Text(title, "bold"), soft_wrap=True)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold", style="cyan")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(f"  {name}"), _as_text("-" if value is None else value))
    console.print(grid)


def merged(table: Table) -> Table:
    """Return the table with texts as cells, where a column that is `below` shares the cell of the one before."""
    columns, rows = list[Column](), [dict[str, Any]() for _ in table.rows]
    for column in table.columns:
        if column.below:
            first = columns[-1]
            title = ", ".join(filter(None, (first.title, column.title.removeprefix(f"{first.title}: "))))
            columns[-1] = replace(first, title=title)
        else:
            columns.append(column)
        for cells, row in zip(rows, table.rows, strict=True):
            text, key = _as_text(row.get(column.key), column.format), columns[-1].key
            cells[key] = Text(" ").join(cell for cell in (cells.get(key, Text()), text) if cell.plain)
    return replace(table, columns=columns, rows=rows)


def draw_table(console: Console, table: Table, bold: str = "") -> None:
    """Print a table, its cells folded where the console has no room for them."""
    if table.title:
        console.print(Text(f"\n{table.title}", "bold"), soft_wrap=True)
    whole = merged(table)
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in whole.columns:
        grid.add_column(Text(column.title), justify="right" if column.format else "left", overflow="fold")
    for cells, row in zip(whole.rows, table.rows, strict=True):
        grid.add_row(*cells.values(), style="bold" if bold and row.get(bold) else "")
    console.print(grid)
    if table.note:
        console.print(Text(table.note, "dim"))


def _stdout() -> Console:
    """Console for stdout; unlimited width unless it is a terminal or COLUMNS is set."""
    console = SafeConsole(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def _as_text(value: Any, form: str = "") -> Text:
    return value if isinstance(value, Text) else Text(without_controls(format_value(value, form)))


@contextmanager
def progress_bar(
    description: str,
    total: int,
    unit: str,
    done: int = 0,
    enabled: bool = True,
    moving: bool = True,
    state: Callable[[], str] = str,
) -> Iterator[Advance]:
    """Show progress on stderr, as a bar or as lines of a log; yields a function that advances it.

    done: units finished before. moving: also redraw between advances, which takes time from what is measured. state:
    returns what a line of a log ends with.
    """
    console, visible = SafeConsole(stderr=True), enabled and not _output.quiet
    if console.is_terminal or not visible:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, auto_refresh=moving, disable=not visible) as progress:
            task = progress.add_task(description, total=total, completed=done, unit=unit)
            yield lambda amount: progress.update(task, advance=amount, refresh=not moving)
        return

    # In a log a moving bar would be thousands of lines. A short stage writes none.
    finished: float = done
    start = last_line = time.monotonic()

    def log_progress(amount: float) -> None:
        nonlocal finished, last_line
        finished, now = finished + amount, time.monotonic()
        if now - last_line >= LOG_EVERY_S:
            last_line = now
            rate = (finished - done) / (now - start)
            left = f", about {(total - finished) / rate:,.0f} s left" if rate else ""
            log_note(f"{description}: {finished:,.0f}/{total:,.0f} {unit}, {rate:.3g} {unit}/s{left}{state()}")

    yield log_progress
