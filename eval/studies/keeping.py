"""results.json of a study: provenance, figures, and a summary of flat numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from draftsmith.data.progress import say
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import RESULTS, describe
from draftsmith.eval.bench.tables import plain_table
from draftsmith.eval.report.figures import Figure, Table, formatted, plain, to_json
from draftsmith.modules.drafters.methods import Models


def keep(
    kind: str,
    config: Any,
    models: Models,
    prompts: Sequence[BenchPrompt],
    figures: Sequence[Figure],
    summary: Mapping[str, Any],
    shown: Sequence[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Write `output`/results.json, last of all: it is there only when the study is complete; and print its tables.

    config: has prompts and output. summary: flat numbers that texts quote. shown: names of the tables to print, None
    for all. more: what else belongs into `meta`.
    """
    smaller = {"draft": models.draft, "mid": models.mid}
    results = {
        "meta": describe(kind, config, models.target, prompts, config.prompts, smaller, **more),
        "figures": to_json(figures),
        "summary": plain(summary),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, results)
    console = Console(highlight=False)
    for figure in figures:
        if isinstance(figure, Table) and (shown is None or figure.name in shown):
            console.print(printed(figure))
    say(f"Written to {config.output / RESULTS}")
    return results


def printed(table: Table) -> Printed:
    """A table on the screen, its note below."""
    shown = plain_table(
        title=table.title, title_justify="left", title_style="bold", caption=table.note, caption_justify="left"
    )
    for column in table.columns:
        shown.add_column(column.title, justify="right" if column.format else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(formatted(row.get(column.key), column.format) for column in table.columns))
    return shown
