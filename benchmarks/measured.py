"""Numbers of a script that measures Draftsmith itself, as lines, JSON and a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.console import log_note, markdown_lines, print_table, table_from_cells
from draftsmith.data.store.manifest import resolved
from draftsmith.eval.meta import hardware
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.provenance import git_commit, package_versions

HEADINGS = ("what", "value", "aim")
FORMATS = {"x": ".2f", "%": ".1f", "tokens/s": ",.0f"}  # by unit


@dataclass(frozen=True)
class Measured:
    """Measured number with its unit and its aim. models: that it was measured on."""

    what: str
    value: float
    unit: str = ""
    aim: str = ""
    models: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        between = "" if self.unit in ("x", "%") else " "
        value = f"{self.value:{FORMATS.get(self.unit, ',.4g')}}{between}{self.unit}".strip()
        return f"{self.models}: {self.what}" if self.models else self.what, value, self.aim


def describe_run(config: Any, device: str = "cpu") -> dict[str, Any]:
    """Return what a script's numbers hold for. config: its options."""
    about = {"settings": resolved(config), "hardware": hardware(device), "versions": package_versions()}
    return {**about, "git_commit": git_commit()}


def report(config: Any, name: str, rows: Iterable[Measured], meta: Mapping[str, Any]) -> Path:
    """Print every row as it comes, write NAME.json and NAME.md into `config.output`; return the directory."""
    measured = []
    for row in rows:
        measured.append(row)
        log_note(" | ".join(row.cells))
    cells = [row.cells for row in measured]
    print_table(table_from_cells(name, HEADINGS, cells, right=HEADINGS[1:]))
    output = make_directory(config.output)
    write_text(output / f"{name}.md", "\n".join(markdown_lines(HEADINGS, cells)) + "\n")
    write_json(output / f"{name}.json", {"meta": meta, "rows": [asdict(row) for row in measured]})
    return output
