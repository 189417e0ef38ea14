"""results.json of a study: provenance, figures, and a summary of flat numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from draftsmith.data.manifest import write_json
from draftsmith.data.progress import say
from draftsmith.eval.figures import Figure, Table, formatted, to_json
from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods.base import Models
from draftsmith.eval.provenance import describe

RESULTS = "results.json"
DIGITS = 5


def keep(
    kind: str,
    config: Any,
    models: Models,
    prompts: Sequence[BenchPrompt],
    figures: Sequence[Figure],
    summary: Mapping[str, Any],
    shown: Sequence[str],
) -> dict[str, Any]:
    """Write `output`/results.json, complete as it appears, and print some of its tables. config: has prompts and
    output. shown: names of tables."""
    smaller = {"draft": models.draft, "mid": models.mid}
    results = {
        "meta": describe(kind, config, models.target, prompts, config.prompts, smaller),
        "figures": to_json(figures),
        "summary": rounded(summary),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    write_json(config.output / RESULTS, results)
    console = Console(highlight=False)
    for figure in figures:
        if isinstance(figure, Table) and figure.name in shown:
            console.print(printed(figure))
    say(f"Written to {config.output / RESULTS}")
    return results


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to DIGITS significant digits, and None for those that are not finite: JSON has no such numbers."""
    return {key: _rounded(value) if isinstance(value, float) else value for key, value in row.items()}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def printed(table: Table) -> Printed:
    """A table on the screen, its note below."""
    shown = Printed(title=table.title, caption=table.note or None, caption_justify="left")
    for column in table.columns:
        shown.add_column(column.title, justify="right" if column.format else "left")
    for row in table.rows:
        shown.add_row(*(formatted(row.get(column.key), column.format) for column in table.columns))
    return shown
