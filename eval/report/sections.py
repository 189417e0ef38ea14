"""The sections of the page, made from runs: what each says it measured, its figures, and how to measure it again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table
from draftsmith.data.store.manifest import flatten
from draftsmith.eval.bench.trace import TRACE
from draftsmith.eval.report.benchmark import bench_figures, temperature_text
from draftsmith.eval.report.drawing import Chart, Drawing, chart
from draftsmith.eval.report.page import Section
from draftsmith.eval.report.runs import Run, temperatures
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.report.training import DRAWINGS as TRAINING
from draftsmith.eval.report.viewer import viewer_data

# Kind of a run -> its title on the page, and how its tables without columns are drawn.
TABLE_RUNS: dict[str, tuple[str, Mapping[str, Drawing]]] = {
    "tune": ("Tuning for this machine", {}),
    "tree": ("A draft tree for a head", {}),
    "schedule": ("How long a server should draft", {}),
    "training": ("Training", TRAINING),
    "under way": ("Under way", {}),
}
MAX_FAILURES = 6  # that are told one by one


def make_sections(groups: Sequence[Sequence[Run]], trace_bytes: int) -> list[Section]:
    """groups: of `comparable`. trace_bytes: of all traces in the page together."""
    traced = [run for runs in groups for run in runs if run.kind == "bench" and (run.path / TRACE).exists()]
    each = trace_bytes // max(1, len(traced))
    sections: list[Section] = []
    for runs in groups:
        title, drawings = TABLE_RUNS.get(runs[0].kind, (runs[0].kind, {}))
        made = _bench_section(runs, each) if runs[0].kind == "bench" else table_section(title, runs[0], drawings)
        while made.name in {other.name for other in sections}:
            made = dataclasses.replace(made, name=f"{made.name}-{len(sections)}")
        sections.append(made)
    return sections


def _bench_section(runs: Sequence[Run], trace_bytes: int) -> Section:
    traces = [viewer_data(run.path, trace_bytes) for run in runs]
    viewer = next((trace for trace in traces if trace is not None), None)
    return _section("Benchmark", runs, bench_figures(runs), viewer=viewer, warnings=_failures(runs))


def table_section(title: str, run: Run, drawings: Mapping[str, Drawing]) -> Section:
    """Show a run's tables. drawings: how those without columns are drawn, by name."""
    return _section(title, [run], [_figure(table, drawings.get(table.name), run) for table in from_json(run.results)])


def _figure(table: Table, drawing: Drawing | None, run: Run) -> Table | Chart:
    """A table as it is, or drawn; what nobody knows how to draw is a table of all that it holds."""
    if table.columns:
        return table
    if drawing is not None:
        return chart(table.name, drawing, table.rows, run.settings)
    keys = dict.fromkeys(key for row in table.rows for key in row)
    return dataclasses.replace(table, title=table.title or table.name, columns=[Column(key, key) for key in keys])


def _section(title: str, runs: Sequence[Run], figures: Sequence[Table | Chart], **more: Any) -> Section:
    return Section(
        name=re.sub(r"[^A-Za-z0-9_-]+", "-", f"{runs[0].kind}-{runs[0].name}").strip("-"),
        title=f"{title} · {', '.join(run.name for run in runs)}",
        about=about(runs[0]),
        figures=figures,
        facts=[fact for run in runs for fact in facts(run, run.name if len(runs) > 1 else "")],
        commands=[str(run.meta["command"]) for run in runs if run.meta.get("command")],
        **more,
    )


def about(run: Run) -> str:
    """What was measured on what, in one sentence."""
    settings, meta = run.settings, run.meta
    prompts, hardware = meta.get("prompts", {}), meta.get("hardware", {})
    parts = [f"Target {settings.get('target', 'not named')}"]
    if drafts := settings.get("draft"):
        parts.append(f"draft {drafts if isinstance(drafts, str) else ', '.join(drafts)}")
    if prompts:
        parts.append(f"{prompts.get('count', '?')} prompts of {prompts.get('source', 'an unnamed source')}")
    if run.kind == "bench":
        parts.append(" and ".join(temperature_text(value) for value in temperatures(run)))
    for key in ("top_k", "top_p"):
        if settings.get(key) not in (None, 0, 1, 1.0):
            parts.append(f"{key.replace('_', '-')} {settings[key]:g}")
    if settings.get("dtype"):
        parts.append(f"{settings['dtype']} on {settings.get('device', 'cpu')}")
    machine = hardware.get("gpu") or hardware.get("cpu")
    if machine:
        parts.append(f"{machine}, {hardware.get('torch_threads', '?')} CPU thread(s)")
    if meta.get("clock"):
        parts.append("CPU time" if meta["clock"] == "cpu" else "wall time")
    if status := meta.get("status"):  # of a training, or of a run that goes on
        return " ".join([status, *(["; ".join(parts) + "."] if settings else [])])
    return "; ".join(parts) + f". Measured {str(meta.get('date', 'at an unknown date'))[:10]}."


def facts(run: Run, prefix: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """What results.json tells of the run, under headings."""
    meta, found = run.meta, []
    shown = {"Numbers": run.results.get("summary"), "Settings": run.settings}
    shown |= {"Versions": meta.get("versions"), "Hardware": meta.get("hardware")}
    shown |= {"Target": meta.get("target"), "Smaller models": meta.get("models"), "Prompts": meta.get("prompts")}
    rest = {key: meta.get(key) for key in ("date", "seed", "git_commit", "clock", "schema_version")}
    shown["Run"] = {"directory": str(run.path), **rest}
    for heading, values in shown.items():
        pairs = [(key, _shown(value)) for key, value in flatten(values or {}).items() if value not in (None, "", [])]
        if pairs:
            found.append((f"{prefix}: {heading}" if prefix else heading, pairs))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _failures(runs: Sequence[Run]) -> list[str]:
    """One line for each prompt that could not be measured, whatever the temperature; the last says how many more."""
    lines = []
    for run in runs:
        for failure in run.results.get("failures") or []:
            where = ", ".join(str(failure[key]) for key in ("task", "id") if failure.get(key) not in (None, ""))
            lines.append(f"Not measured in {run.name}: {where}: {failure.get('error', 'no reason given')}")
    lines = list(dict.fromkeys(lines))
    more = len(lines) - MAX_FAILURES
    return lines if more <= 0 else [*lines[:MAX_FAILURES], f"{more} more prompts were not measured: see results.json."]
