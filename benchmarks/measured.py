"""Numbers of a script that measures Draftsmith itself, as lines, JSON and a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.console import Table, format_value, log_note, markdown_lines, print_text
from draftsmith.data.store.manifest import resolved
from draftsmith.eval.meta import hardware
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.provenance import git_commit, package_versions


@dataclass(frozen=True)
class Measured:
    """Measured number with its unit and its aim: `>= A`, `<= A`, `< A`, `A to B`, or none."""

    what: str
    value: float
    unit: str = ""
    aim: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        return self.what, f"{self.value:,.4g} {self.unit}".strip(), self.aim

    @property
    def reached(self) -> bool | None:
        """Return whether the number reaches its aim; None if it has no aim."""
        if not self.aim:
            return None
        first, *words, last = self.aim.split()
        if words:
            return float(first) <= self.value <= float(last)
        return {">=": self.value >= float(last), "<=": self.value <= float(last), "<": self.value < float(last)}[first]


def markdown(table: Table) -> str:
    """Format a table in Markdown, with its title and note."""
    rows = [
        [format_value(row.get(column.key), column.format).replace("\n", " ") for column in table.columns]
        for row in table.rows
    ]
    lines = [f"**{table.title}**", "", *markdown_lines([column.title for column in table.columns], rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def describe_run(config: Any, device: str = "cpu") -> dict[str, Any]:
    """Return what a script's numbers hold for. config: its options."""
    about = {"settings": resolved(config), "hardware": hardware(device), "versions": package_versions()}
    return {**about, "git_commit": git_commit()}


def write_tables(config: Any, path: Path, name: str, rows: Sequence[Any], tables: Sequence[Table]) -> Path:
    """Write the rows as `name` of a JSON file, and the tables beside it as Markdown; print them; return the path."""
    write_json(path, {"meta": describe_run(config), name: rows})
    text = "\n".join(map(markdown, tables))
    write_text(path.with_suffix(".md"), text)
    print_text(f"{text}\nWritten to {path.with_suffix('.md')}")
    return path


def report(config: Any, name: str, rows: Iterable[Measured]) -> Path:
    """Print every row as it comes, write NAME.json and NAME.md into `config.output`; return the directory.

    The files are written again with every row: those of a process that is stopped have the rows until then.
    """
    measured, output, meta = list[Measured](), make_directory(config.output), describe_run(config, config.device)
    for row in rows:
        measured.append(row)
        log_note(" | ".join(row.cells))
        lines = markdown_lines(("what", "value", "aim"), [row.cells for row in measured])
        write_text(output / f"{name}.md", "\n".join(lines) + "\n")
        write_json(output / f"{name}.json", {"meta": meta, "rows": [asdict(row) for row in measured]})
    return output
