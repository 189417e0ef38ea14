"""A report in Weights & Biases: its tables, its charts as images, the page itself, and the headline numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.screen import note
from draftsmith.data.tables import Table
from draftsmith.data.tracking import Choice, finish_wandb, start_wandb
from draftsmith.eval.report.files import contents
from draftsmith.eval.report.page import Section


def log_report(page: Path, sections: Sequence[Section], mode: Choice, **options: Any) -> None:
    """One run of job type `report`, its files under the page's directory; offline where there is no key.

    options: of `wandb.init`. Its summary has SECTION/TABLE/METHOD/speedup and tau of headline tables.
    """
    import wandb
    from PIL import Image

    run = start_wandb(wandb, mode, {**options, "job_type": "report", "dir": str(page.parent)}, note)
    logged: dict[str, Any] = {"report": wandb.Html(page.read_text("utf-8"), inject=False)}
    for section in sections:
        for figure in section.figures:
            key = f"{section.name}/{figure.name}"
            if isinstance(figure, Table):
                keys: list[Any] = [column.key for column in figure.columns]
                rows = [[row.get(name) for name in keys] for row in figure.rows]
                logged[key] = wandb.Table(columns=keys, data=rows, allow_mixed_types=True)
                if figure.name.startswith("headline"):
                    for row in figure.rows:
                        numbers = {f"{key}/{row['method']}/{name}": row.get(name) for name in ("speedup", "tau")}
                        run.summary.update({name: value for name, value in numbers.items() if value is not None})
            elif figure.specification is not None:
                image = Image.open(io.BytesIO(contents(figure, ("png",))["png"]))
                logged[key] = wandb.Image(image, caption=figure.title)
    run.log(logged)
    finish_wandb(run, note)
