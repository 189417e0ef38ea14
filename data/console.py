"""What commands tell: their answer on stdout, as text and tables or, with --json, as one document; notes on stderr.

A table that a terminal has no room for is shown in its long form, one block of lines a row: no name or number is cut or
broken. In a pipe or a file it has its full width.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from draftsmith.data.tables import Column, Row, Table, formatted, plain

# Of its widest cell's width a column of words keeps this share, or so many columns, before the long form is taken.
WRAPPED, PROSE = 0.6, 24
INDENT, BETWEEN = 2, "   "
UNLIMITED = 10_000  # columns of a pipe or a file


@dataclass
class Screen:
    """How this process tells what it does. document: of --json, which is filled instead of printing."""

    quiet: bool = False
    document: dict[str, Any] | None = None
    texts: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)


_screen = Screen()


@contextmanager
def telling(quiet: bool = False, as_json: bool = False) -> Iterator[Screen]:
    """For what runs inside: quiet leaves notes and progress out; as_json collects what is told, and sends whatever else
    is printed to stderr."""
    global _screen
    before, _screen = _screen, Screen(quiet, {} if as_json else None)
    try:
        if as_json:
            with redirect_stdout(sys.stderr):
                yield _screen
        else:
            yield _screen
    finally:
        _screen = before


def document(screen: Screen, **more: Any) -> str:
    """What a command told, as JSON: what it answered, its `tables` with their values, and its `text`."""
    told: dict[str, Any] = {"tables": screen.tables, "text": screen.texts}
    whole = {**more, **(screen.document or {}), **{name: value for name, value in told.items() if value}}
    return json.dumps(plain(whole), indent=2, ensure_ascii=False, default=str)


def is_quiet() -> bool:
    return _screen.quiet


def say(text: str | Text) -> None:
    """Lines of the answer, on stdout."""
    if _screen.document is not None:
        _screen.texts.append(str(text).strip("\n"))
        return
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


def note(text: str | Text) -> None:
    """Lines beside the answer, on stderr."""
    if not _screen.quiet:
        Console(soft_wrap=True, highlight=False, markup=False, stderr=True).print(text)


def answer(**values: Any) -> bool:
    """Values of the document; False without --json, where the caller prints them."""
    if _screen.document is not None:
        _screen.document |= values
    return _screen.document is not None


def show(table: Table, bold: str = "") -> None:
    """A table of the answer, on stdout.

    bold: key that is true in rows to stand out.
    """
    if _screen.document is not None:
        _screen.tables.append(as_values(table))
    else:
        print_table(wide_console(), table, bold)


def show_facts(facts: Mapping[str, Any], title: str = "", key: str = "facts") -> None:
    """Names and values of the answer in lines; None is a dash. key: in the document."""
    if answer(**{key: dict(facts)}):
        return
    console = wide_console()
    if title:
        console.print(Text(title, "bold"), soft_wrap=True)
    print_wide(console, pairs([(name, as_text("-" if value is None else value)) for name, value in facts.items()]))


def as_values(table: Table) -> dict[str, Any]:
    """A table in the document: its rows by the keys of its columns."""
    keys = [column.key for column in table.columns]
    rows = [{key: row.get(key) for key in keys} for row in table.rows]
    shown = {"name": table.name, "title": table.title, "rows": rows, "note": table.note}
    return {name: value for name, value in shown.items() if value or name == "rows"}


def wide_console() -> Console:
    """Of stdout; its lines end where a terminal's do, or COLUMNS says, and else nowhere."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def print_table(console: Console, table: Table, bold: str = "") -> None:
    """A table that the console has room for, its title above and its note below it."""
    if table.title:
        console.print(Text(f"\n{table.title}", "bold"), soft_wrap=True)
    stacks = stacked(table.columns)
    rows = [[cells_of(row, stack) for stack in stacks] for row in table.rows]
    styles = ["bold" if bold and row.get(bold) else "" for row in table.rows]
    beside, below = ([[Text(joint).join(cells) for cells in row] for row in rows] for joint in (" ", "\n"))
    grids = (laid_out(console, stacks, cells, styles) for cells in (beside, below))
    long_form = Group(*blocks(console.width, stacks, beside, styles))
    print_wide(console, next((grid for grid in grids if grid is not None), long_form))
    if table.note:
        print_wide(console, Text(table.note, "dim"))


def print_wide(console: Console, shown: RenderableType) -> None:
    """As wide as it is, where there is room; a file has no blanks at the ends of lines."""
    width = max(natural(console, shown).maximum, 1)
    if console.is_terminal:
        console.print(shown, width=width)
        return
    with console.capture() as made:
        console.print(shown, width=width)
    print("\n".join(line.rstrip() for line in made.get().splitlines()), file=console.file)


def natural(console: Console, shown: RenderableType) -> Measurement:
    """Its widest word and its widest line."""
    return Measurement.get(console, console.options.update(width=UNLIMITED), shown)


def stacked(columns: Sequence[Column]) -> list[list[Column]]:
    """Columns as they stand beside each other, each with those `below` it."""
    stacks: list[list[Column]] = []
    for column in columns:
        if column.below:
            stacks[-1].append(column)
        else:
            stacks.append([column])
    return stacks


def cells_of(row: Row, stack: Sequence[Column]) -> list[Text]:
    """What a row has there; texts with styles stay as they are."""
    cells = (as_text(row.get(column.key), column.format) for column in stack)
    return [cell for cell in cells if cell.plain]


def as_text(value: Any, form: str = "") -> Text:
    return value if isinstance(value, Text) else Text(formatted(value, form))


def laid_out(console: Console, stacks: list[list[Column]], rows: list[list[Text]], styles: list[str]) -> Grid | None:
    """Rows under headings; None where they would have to break words or squeeze sentences."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    widths, least = [], []
    for number, (column, *below) in enumerate(stacks):
        titles = [column.title, *(under.title.removeprefix(f"{column.title}: ") for under in below)]
        heading = Text(", ".join(filter(None, titles)))
        grid.add_column(heading, justify="right" if column.format else "left", overflow="fold")
        head, *cells = (natural(console, text) for text in (heading, *(row[number] for row in rows)))
        widest = max((cell.maximum for cell in cells), default=0)
        some = widest if below else min(math.ceil(widest * WRAPPED), PROSE)
        widths.append(max(head.maximum, widest))
        least.append(max(head.minimum, some, *(cell.minimum for cell in cells), 0))
    for cells_, style in zip(rows, styles, strict=True):
        grid.add_row(*cells_, style=style)
    spare = console.width - natural(console, grid).maximum + sum(widths)
    if sum(least) > spare:
        return None
    for drawn, width in zip(grid.columns, fitted(widths, least, spare), strict=True):
        drawn.width = width
    return grid


def fitted(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths whose sum is at most `room`, taken from where there is most to give."""
    found = list(widths)
    while sum(found) > room:
        slack = [width - low for width, low in zip(found, least, strict=True)]
        found[slack.index(max(slack))] -= 1
    return found


def blocks(
    room: int, stacks: list[list[Column]], rows: list[list[Text]], styles: list[str]
) -> Iterator[RenderableType]:
    """The long form: what tells a row from the others, and below it its values behind their headings, side by side as
    far as there is room."""
    names = [": ".join(filter(None, (column.group, column.title))) for column, *_ in stacks]
    prefixes = (len({tuple(cell.plain for cell in row[:count]) for row in rows}) for count in range(1, len(stacks)))
    telling = next((count for count, distinct in enumerate(prefixes, 1) if distinct == len(rows)), 1)
    for row, style in zip(rows, styles, strict=True):
        known = [(name, cell) for name, cell in zip(names, row, strict=True) if cell.plain]
        named = [Text.assemble((name, "cyan"), " " if name else "", cell) for name, cell in known]
        yield Text()
        yield Text.assemble(Text(BETWEEN).join([*(cell for _, cell in known[:1]), *named[1:telling]]), style="bold")
        yield Padding(Group(*flowing(named[telling:], room - INDENT)), (0, 0, 0, INDENT), style=style)
    yield Text()


def flowing(parts: Sequence[Text], room: int) -> Iterator[Text]:
    """Lines of whole parts; one that no line holds is a line of its own."""
    line: list[Text] = []
    for part in parts:
        if line and sum(map(len, line)) + len(BETWEEN) * len(line) + len(part) > room:
            yield Text(BETWEEN).join(line)
            line = []
        line.append(part)
    yield Text(BETWEEN).join(line)


def pairs(values: Sequence[tuple[str, Text]]) -> Grid:
    """Names, indented, beside values, whose words wrap."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for name, value in values:
        grid.add_row(Text(" " * INDENT + name), value)
    return grid
