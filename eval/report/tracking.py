"""A report in Weights & Biases: its tables, its charts as images, the page itself, and the headline numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.heads.measured import CARD
from draftsmith.data.screen import note
from draftsmith.data.tables import Table
from draftsmith.data.tracking import (
    Choice,
    finish_wandb,
    head_artifact,
    head_name,
    plain_name,
    start_wandb,
    use_artifact,
)
from draftsmith.eval.bench.results import RESULTS
from draftsmith.eval.report.files import contents
from draftsmith.eval.report.page import Section
from draftsmith.eval.report.runs import Run
from draftsmith.eval.report.training import METRICS

ROUND = ("method", "temperature", "prompt", "turn", "round", "drafted", "emitted", "num_drafted", "num_accepted")


def log_report(page: Path, sections: Sequence[Section], runs: Sequence[Run], mode: Choice, **options: Any) -> None:
    """One run of job type `report`, its files under the page's directory; offline where there is no key.

    options: of `wandb.init`. Its summary has SECTION/TABLE/METHOD/speedup and tau of headline tables. The heads that
    were measured are its inputs, the page and the results its output: with what trainings log, the lineage from data to
    results.
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
        if section.viewer is not None:
            logged[f"{section.name}/rounds"] = wandb.Table(columns=list(ROUND), data=list(rounds(section.viewer)))
    run.log(logged)
    log_lineage(wandb, run, page, runs)
    finish_wandb(run, note)


def rounds(viewer: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Rows of ROUND, of the answers that the page shows round by round."""
    texts = viewer["tokens"]
    for answer in viewer["answers"]:
        prompt = viewer["prompts"][answer["prompt"]]
        for number, one in enumerate(answer["rounds"]):
            drafted, emitted = ("".join(texts[token] for token in one.get(name, ())) for name in ("drafted", "emitted"))
            said = [viewer["methods"][answer["method"]], answer["temperature"], prompt["id"], prompt["turn"], number]
            yield [*said, drafted, emitted, len(one.get("drafted", ())), len(one.get("accepted", ()))]


def log_lineage(wandb: Any, run: Any, page: Path, runs: Sequence[Run]) -> None:
    """The measured heads as inputs, page and results as output."""
    files = Path(run.dir).resolve().parent
    heads = {str(head["path"]): None for one in runs for head in (one.meta.get("heads") or {}).values()}
    for number, path in enumerate(map(Path, heads)):
        if (path / CARD).is_file():  # it lies where it was measured
            use_artifact(run, head_artifact(wandb, head_name(path), path, files / f"head-card-{number}.md"))
    made = wandb.Artifact(plain_name(f"results-{page.stem}"), type="results")
    made.add_file(str(page.resolve()), name=page.name, policy="immutable", skip_cache=True)
    for one in runs:
        for path in (one.path / RESULTS, one.path / METRICS):
            if path.is_file():
                made.add_file(str(path.resolve()), name=f"{one.name}/{path.name}", policy="immutable", skip_cache=True)
    run.log_artifact(made)
