"""Sections of the page: what each run measured, its figures, and the command that measures it again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table
from draftsmith.eval.bench.tables import mode
from draftsmith.eval.bench.trace import TRACE
from draftsmith.eval.report.benchmark import bench_figures, verdicts
from draftsmith.eval.report.drawing import Chart, Drawing, chart, x_number
from draftsmith.eval.report.page import Section
from draftsmith.eval.report.runs import Run, temperatures
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.report.training import DRAWINGS as TRAINING
from draftsmith.eval.report.training import line_of
from draftsmith.eval.report.viewer import viewer_data
from draftsmith.modules.pretrained.provenance import flatten

LOAD = x_number("at_step", "requests at once")
# Kind of a run -> its title on the page, and drawings of its tables without columns.
TABLE_RUNS: dict[str, tuple[str, Mapping[str, Drawing]]] = {
    "certify": ("Certificate", {}),
    "replay": ("Replayed answers", {}),
    "served": (
        "In a server",
        {"served-load": line_of("Tokens a second by requests at once", "tokens/s", "~s", x=LOAD)},
    ),
    "training": ("Training", TRAINING),
}
MAX_FAILURES = 6  # listed one by one


def make_sections(runs: Sequence[Run], trace_bytes: int) -> list[Section]:
    """Return a section for each run; all traces together take at most `trace_bytes`."""
    traced = [run for run in runs if run.kind == "bench" and (run.path / TRACE).exists()]
    sections: list[Section] = []
    for run in runs:
        if run.kind == "bench":
            viewer = viewer_data(run.path, trace_bytes // max(1, len(traced)))
            details = {"viewer": viewer, "warnings": failures(run), "verdicts": verdicts(run)}
            section = make_section("Benchmark", run, bench_figures(run), **details)
        else:
            title, drawings = TABLE_RUNS.get(run.kind, (run.kind, {}))
            section = table_section(title, run, drawings)
        while section.name in {other.name for other in sections}:  # names are anchors
            section = dataclasses.replace(section, name=f"{section.name}-{len(sections)}")
        sections.append(section)
    return sections


def table_section(title: str, run: Run, drawings: Mapping[str, Drawing]) -> Section:
    """Show a run's tables; those without columns are drawn by `drawings`, or shown with all they hold."""
    figures: list[Table | Chart] = []
    for table in from_json(run.results):
        if table.columns:
            figures.append(table)
        elif table.name in drawings:
            figures.append(chart(table.name, drawings[table.name], table.rows))
        else:
            columns = [Column(key, key) for key in dict.fromkeys(key for row in table.rows for key in row)]
            figures.append(dataclasses.replace(table, title=table.title or table.name, columns=columns))
    return make_section(title, run, figures)


def make_section(title: str, run: Run, figures: Sequence[Table | Chart], **details: Any) -> Section:
    """Return a section with the facts and the command of its run."""
    return Section(
        name=re.sub(r"[^A-Za-z0-9_-]+", "-", f"{run.kind}-{run.name}").strip("-"),
        title=f"{title} · {run.name}",
        about=about(run),
        figures=figures,
        facts=facts(run),
        command=str(run.meta.get("command") or ""),
        **details,
    )


def about(run: Run) -> str:
    """Return one sentence on what was measured: models, prompts, sampling, machine and date."""
    settings, meta = run.settings, run.meta
    prompts, hardware = meta.get("prompts", {}), meta.get("hardware", {})
    parts = [f"Target {settings.get('target', 'not named')}"]
    if drafts := settings.get("draft"):
        parts.append(f"draft {drafts if isinstance(drafts, str) else ', '.join(drafts)}")
    if prompts:
        parts.append(f"{prompts.get('count', '?')} prompts of {prompts.get('source', 'an unnamed source')}")
    if run.kind == "bench":
        parts.append(" and ".join(mode(value) for value in temperatures(run)))
    if settings.get("dtype"):
        parts.append(f"{settings['dtype']} on {settings.get('device', 'cpu')}")
    if machine := hardware.get("gpu") or hardware.get("cpu"):
        parts.append(f"{machine}, {hardware.get('torch_threads', '?')} CPU thread(s)")
    if meta.get("clock"):
        parts.append("CPU time" if meta["clock"] == "cpu" else "wall time")
    if status := meta.get("status"):  # a training
        return " ".join([status, *(["; ".join(parts) + "."] if settings else [])])
    return "; ".join(parts) + f". Measured {str(meta.get('date', 'at an unknown date'))[:10]}."


def facts(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what results.json records of the run, under headings."""
    meta = run.meta
    run_facts = {key: meta.get(key) for key in ("date", "seed", "git_commit", "clock", "schema_version")}
    groups = {
        "Numbers": run.results.get("summary"),
        "Settings": run.settings,
        "Versions": meta.get("versions"),
        "Hardware": meta.get("hardware"),
        "Target": meta.get("target"),
        "Smaller models": meta.get("models"),
        "Prompts": meta.get("prompts"),
        "Run": {"directory": str(run.path), **run_facts},
    }

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        return value if isinstance(value, str) else json.dumps(value)

    headed = []
    for heading, values in groups.items():
        pairs = [(key, text(value)) for key, value in flatten(values or {}).items() if value not in (None, "", [])]
        if pairs:
            headed.append((heading, pairs))
    return headed


def failures(run: Run) -> list[str]:
    """Return a line for each prompt that was not measured, at any temperature; the last one counts the rest."""
    lines = dict.fromkeys(
        f"Not measured: {failure['task'] or 'prompt'}, {failure['id']}: {failure['error']}"
        for failure in run.results.get("failures") or []
    )
    rest = len(lines) - MAX_FAILURES
    more = [f"{rest} more prompts were not measured: see results.json."] if rest > 0 else []
    return [*list(lines)[:MAX_FAILURES], *more]
