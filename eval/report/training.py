"""A training's `metrics.csv` as results that the report shows, also while it runs."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import yaml

from draftsmith.data.console import Column, Table
from draftsmith.data.store.writer import is_written
from draftsmith.eval.bench.results import Row
from draftsmith.eval.report.drawing import Drawing, Rows, color, drawn, tips, x_number, y_number
from draftsmith.eval.report.tables import drawn_data, to_json
from draftsmith.modules.pretrained.reading import REMEDY, check_shape, metric_rows, read_text
from draftsmith.modules.types import InputError

METRICS, SETTINGS, FINISHED = "metrics.csv", "config.yaml", "training.json"
DEPTH = re.compile(r"val/(agreement|top1|accepted)_(\d+)$")  # acceptance of a draft's token at this depth
STEP = x_number("at_step", "step", "~s")
MANY = 100  # points of a line, above which they are not drawn
TIPS = tips("series", at_step=",.0f", value=".4g")


def line_of(title: str, what: str, form: str = "", note: str = "", x: Any = STEP) -> Drawing:
    """Return a drawing with a line for each series over the steps, or over another x."""

    def draw(rows: Rows) -> Any:
        point: Any = "transparent" if len(rows) > MANY else alt.OverlayMarkDef(filled=True, size=38)
        line = alt.Chart().mark_line(point=point)
        return drawn([line.encode(x, color("series", " "), y_number("value", what, form), tooltip=TIPS)], rows)

    return Drawing(title, draw, note)


DRAWINGS = {
    "training-loss": line_of("Loss", "loss", ".3~f"),
    "training-tau": line_of("Tau, by decoding", "τ", ".2f", "Of real decoding of held-out prompts, by chains."),
    "training-depth": line_of(
        "Acceptance by depth", "right, where those before are", ".0%", "On held-out text, by places in a draft."
    ),
    "training-speed": line_of("Throughput", "tokens a second", "~s"),
}


def is_training(directory: Path) -> bool:
    """Check for a training that has logged something."""
    return (directory / METRICS).is_file()


def read_training(directory: Path) -> dict[str, Any]:
    """Read a training's directory as results: its curves so far, its latest numbers, its settings.

    Raises:
        InputError: one of its files is damaged.
    """
    rows = [
        {name: float(value) for name, value in row.items() if value} | {"step": int(row["step"])}
        for row in metric_rows(directory / METRICS)
    ]
    path = directory / SETTINGS
    text = read_text(path, "settings of a training") if path.exists() else ""
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InputError(str(path), f"damaged ({error})", "YAML", REMEDY) from error
    check_shape(path, settings, {})
    kind = re.match(r"# draftsmith (\S+ \S+)", text)
    command = f"draftsmith {kind[1]} --config {shlex.quote(str(directory / SETTINGS))}" if kind else None
    step = max((row["step"] for row in rows), default=0)
    if (directory / FINISHED).exists():
        status = f"Finished after {step:,.0f} steps."
    elif is_written(directory):
        status = f"Running: step {step:,.0f} is the last one logged."
    else:
        status = f"Interrupted: step {step:,.0f} is the last one logged. The same command continues."
    drawn = {name: list(series(rows, name)) for name in DRAWINGS}
    # One step is a dot: its numbers stand in the table.
    drawn = {name: points for name, points in drawn.items() if len({point["at_step"] for point in points}) > 1}
    tables = [*(drawn_data(name, points) for name, points in drawn.items()), latest(rows)]
    changed = datetime.datetime.fromtimestamp((directory / METRICS).stat().st_mtime, datetime.UTC)
    meta = {"kind": "training", "settings": settings, "command": command, "status": status}
    meta["date"] = changed.strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"meta": meta, "tables": to_json(tables), "summary": {"step": step}}


def series(rows: Sequence[Row], name: str) -> Iterator[dict[str, Any]]:
    """Yield the points of one of DRAWINGS."""
    for row in rows:
        for key, value in row.items():
            depth = DEPTH.match(key)
            named = {
                "training-loss": {"train/loss": "training", "val/loss": "validation"}.get(key),
                "training-tau": {"val/tau": "tau"}.get(key),
                "training-depth": f"token {depth[2]}" if depth else {"val/top1": "token 1"}.get(key),
                "training-speed": {"cost/tokens_per_s": "training"}.get(key),
            }[name]
            if named is not None and not (key == "val/top1" and "val/agreement_1" in row):
                yield {"at_step": row["step"], "series": named, "value": value}


def latest(rows: Sequence[Row]) -> Table:
    """Return the table of every metric's last value, its step, and its range."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step":
                before = found.get(key, {"lowest": value, "highest": value})
                low, high = min(before["lowest"], value), max(before["highest"], value)
                found[key] = {"metric": key, "value": value, "step": row["step"], "lowest": low, "highest": high}
    columns = [Column("metric", "metric"), Column("value", "latest", ".4g"), Column("step", "at step", ",.0f")]
    columns += [Column("lowest", "lowest", ".4g"), Column("highest", "highest", ".4g")]
    return Table("training-latest", "Latest numbers", columns, [found[key] for key in sorted(found)])
