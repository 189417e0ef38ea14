"""Trainings, and runs under way, as the report reads them: `metrics.csv` or journals in the place of results.json.

They are what `eval report --watch` shows of a run that goes on; a finished training is shown by `eval report` too.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.console import Column, Table
from draftsmith.data.store.reading import REMEDY, check_shape, metric_rows, read_object, read_text
from draftsmith.eval.bench.journal import JOURNAL, whole_lines
from draftsmith.eval.bench.results import BASELINE, COLUMNS, COUNTS, RESULTS, Row, totals_of
from draftsmith.eval.bench.summary import speedup
from draftsmith.eval.report.drawing import Drawing, colour, lines, tips, x_number, y_number
from draftsmith.eval.report.tables import drawn_data, to_json
from draftsmith.modules.types import InputError

METRICS, SETTINGS, FINISHED = "metrics.csv", "config.yaml", "training.json"
DEPTH = re.compile(r"val/(agreement|top1|accepted)_(\d+)$")  # how often a draft's token at this depth is right
STEP = x_number("at_step", "step", "~s")
MANY = 100  # points: more are not drawn apart
TIPS = tips("series", at_step=",.0f", value=".4g")


def line_of(title: str, what: str, form: str = "", note: str = "") -> Drawing:
    """A line for each series over the steps."""
    y = y_number("value", what, form)
    return Drawing(title, lambda rows: lines(STEP, y, colour("series", " "), TIPS, many=len(rows) > MANY)(rows), note)


DRAWINGS = {
    "training-loss": line_of("Loss", "loss", ".3~f"),
    "training-tau": line_of("Tau, by decoding", "τ", ".2f", "Of real decoding of held-out prompts, by chains."),
    "training-depth": line_of(
        "Acceptance by depth", "right, where those before are", ".0%", "On held-out text, by places in a draft."
    ),
    "training-speed": line_of("Throughput", "tokens a second", "~s"),
}


def is_training(directory: Path) -> bool:
    """Whether a training has logged something there."""
    return (directory / METRICS).is_file()


def read_training(directory: Path) -> dict[str, Any]:
    """A training's directory as results of a study: its curves so far, its latest numbers, its settings.

    Raises:
        InputError: one of its files is damaged.
    """
    rows = list(read_metrics(directory / METRICS))
    text, settings = read_settings(directory / SETTINGS)
    if not is_going_on(directory):
        read_object(directory / FINISHED, {})
    kind = re.match(r"# draftsmith (\S+ \S+)", text)
    command = f"draftsmith {kind[1]} --config {shlex.quote(str(directory / SETTINGS))}" if kind else None
    step = max((row["step"] for row in rows), default=0)
    status = (
        f"Finished after {step:,.0f} steps."
        if not is_going_on(directory)
        else f"Going on: step {step:,.0f} is the last that is logged."
    )
    drawn = {name: list(series(rows, name)) for name in DRAWINGS}
    tables = [*(drawn_data(name, found) for name, found in drawn.items() if found), latest(rows)]
    changed = datetime.datetime.fromtimestamp((directory / METRICS).stat().st_mtime, datetime.UTC)
    meta = {"kind": "training", "settings": settings, "command": command, "status": status}
    meta["date"] = changed.strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"meta": meta, "tables": to_json(tables), "summary": {"step": step}}


def read_settings(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a training's config.yaml and the settings in it; empty where there is none."""
    if not path.exists():
        return "", {}
    text = read_text(path, "settings of a training")
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InputError(str(path), f"damaged ({error})", "YAML", REMEDY) from error
    check_shape(path, settings, {})
    return text, settings


def is_going_on(directory: Path) -> bool:
    """Whether the run there has not written what it writes last."""
    return not (directory / (FINISHED if is_training(directory) else RESULTS)).exists()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Rows of metrics.csv as numbers."""
    for row in metric_rows(path):
        yield {name: float(value) for name, value in row.items() if value} | {"step": int(row["step"])}


def series(rows: Sequence[Row], name: str) -> Iterator[dict[str, Any]]:
    """Points of one of DRAWINGS."""
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
    """The last value of every metric, and where it was logged."""
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


def read_under_way(directory: Path) -> dict[str, Any]:
    """What a benchmark or study that goes on has measured: of its journals, and of its parts that are done."""
    rows: list[dict[str, Any]] = []
    for path in sorted({*directory.glob(f"*/{JOURNAL}"), *directory.glob(JOURNAL), *directory.glob(f"*/{RESULTS}")}):
        part = path.parent.name
        lines = whole_lines(path) if path.name == JOURNAL else []
        for number, line in enumerate(lines, start=1):
            check_shape(path, line, {"rows?": [MEASURED]}, place=f"line {number}")
        measured = [row for line in lines for row in line.get("rows", ())]
        rows += [{"part": part, "state": "going on", **row} for row in so_far(measured)]
        if path.name == RESULTS:
            done = read_object(path, {"methods?": [dict]}).get("methods", [])
            rows += [{"part": part, "state": "done", **{key: row.get(key) for key in KEYS}} for row in done]
    columns = [Column("part", "part"), Column("method", "method"), Column("temperature", "temperature", "g")]
    columns += [Column("prompts", "prompts", ",d"), Column("tau", "tau", ".2f")]
    columns += [Column("speedup", "speed-up", ".2fx"), Column("state", "")]
    note = "Without intervals, which the finished run has. It is not a result."
    meta = {"kind": "under way", "settings": {}, "status": "Going on." if rows else "Nothing is measured yet."}
    return {"meta": meta, "tables": to_json([Table("under-way", "Measured so far", columns, rows, note)])}


KEYS = ("method", "temperature", "prompts", "tau", "speedup")
# What `so_far` reads of a journal's rows.
MEASURED = {name: COLUMNS[name] for name in ("method", "temperature", "error", "tokens", "wall_s", *COUNTS)}


def so_far(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each method and temperature of a journal's rows, by the wall."""
    places: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if row["error"] is None:
            places.setdefault((row["temperature"], row["method"]), []).append(row)
    for (temperature, method), own in places.items():
        base, totals = places.get((temperature, BASELINE)), totals_of(own)
        speed = speedup(own, base, "wall") if base else None
        found = {"method": method, "temperature": temperature, "prompts": totals.prompts}
        yield {**found, "tau": totals.tau, "speedup": speed}
