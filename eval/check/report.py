"""Result of a check, as it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.text import Text

from draftsmith.data.console import print_table, print_text, table_from_cells
from draftsmith.modules.formats.base import Problem


@dataclass(frozen=True)
class Measure:
    """A measured value of a check, its bar, and whether it is met."""

    name: str
    value: str
    bar: str
    passed: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.bar})"


@dataclass
class CheckReport:
    """Result of a check. problems: tensors and settings that differ. notes: what was left out or assumed."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Everything that differs, a line each."""
        lines = [f"{problem.where}: {problem.text}" for problem in self.problems]
        return lines + [str(measure) for measure in self.measures if not measure.passed]

    @property
    def passed(self) -> list[str]:
        """Measures for the card, a line each."""
        return [str(measure) for measure in self.measures]


def print_report(report: CheckReport, directory: str, format: str) -> None:
    """Print what differs, what was measured, and the notes."""
    print_text(Text(f"{directory} as {format} reads it", "bold"))
    if report.problems:
        rows = [(Text(problem.where, "red"), problem.text) for problem in report.problems]
        print_table(table_from_cells("error", ("differs", "as"), rows))
    if report.measures:
        marks = {True: Text("ok", "green"), False: Text("DIFFERS", "bold red")}
        measured = [(m.name, m.value, m.bar, marks[m.passed]) for m in report.measures]
        print_table(table_from_cells("measured", ("measured", "value", "bar", "verdict"), measured))
    for note in report.notes:
        print_text(f"  note: {note}")
    count = len(report.failures)
    text = f"{count} difference{'s' if count > 1 else ''}"
    print_text(Text(text, "bold red") if count else Text("nothing differs", "green"))
