"""A report in Weights & Biases: its tables, its charts as images, the page itself, and the headline numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from draftsmith.data.progress import say
from draftsmith.data.store.manifest import resolved
from draftsmith.data.tracking import finish_wandb, start_wandb
from draftsmith.eval.report.files import contents
from draftsmith.eval.report.page import Section
from draftsmith.eval.report.settings import ReportConfig
from draftsmith.eval.report.tables import Table


def log_report(config: ReportConfig, sections: Sequence[Section]) -> None:
    """One run of job type `report`, its files under the page's directory; offline where there is no key."""
    import wandb
    from PIL import Image

    options: dict[str, Any] = {
        "project": config.project,
        "name": config.run_name or f"report {config.output.stem}",
        "job_type": "report",
        "dir": str(config.output.parent),
        "config": resolved(config),
    }
    run = start_wandb(wandb, config.wandb, options, say)
    logged: dict[str, Any] = {"report": wandb.Html(config.output.read_text("utf-8"), inject=False)}
    for section in sections:
        for figure in section.figures:
            key = f"{section.name}/{figure.name}"
            if isinstance(figure, Table):
                keys: list[Any] = [column.key for column in figure.columns]
                rows = [[row.get(name) for name in keys] for row in figure.rows]
                logged[key] = wandb.Table(columns=keys, data=rows, allow_mixed_types=True)
            elif figure.specification is not None:
                image = Image.open(io.BytesIO(contents(figure, ("png",))["png"]))
                logged[key] = wandb.Image(image, caption=figure.title)
    run.log(logged)
    for name, value in headline_numbers(sections).items():
        run.summary[name] = value
    finish_wandb(run, say)


def headline_numbers(sections: Sequence[Section]) -> dict[str, float]:
    """SECTION/TABLE/ROW/COLUMN of the numbers over all prompts in headline tables."""
    found: dict[str, float] = {}
    for section in sections:
        for figure in section.figures:
            if isinstance(figure, Table) and figure.name.startswith("headline"):
                for row in figure.rows:
                    for key in ("speedup", "tau"):
                        if row.get(key) is not None:
                            found[f"{section.name}/{figure.name}/{row['method']}/{key}"] = row[key]
    return found
