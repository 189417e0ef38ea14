"""From runs to the sections of the page: what each says it measured, its figures, and how to measure it again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from draftsmith.data.store.manifest import flatten
from draftsmith.eval.bench.trace import TRACE
from draftsmith.eval.report.benchmark import bench_figures, mode, speeds
from draftsmith.eval.report.charts import against
from draftsmith.eval.report.figures import Figure, from_json
from draftsmith.eval.report.page import Drawn, Section
from draftsmith.eval.report.runs import Run, temperatures
from draftsmith.eval.report.viewer import share, viewer_data

TITLES = {
    "bench": "Benchmark",
    "specdecpp": "SpecDec++: when to stop drafting",
    "eagle2": "EAGLE-2: draft trees",
    "hsddw": "HSDDW: entropy and draft windows",
    "calibration": "Calibration of acceptance",
    "policies": "Stop policies: what an acceptance head is worth",
    "tune": "Tuning for this machine",
}
MAX_FAILURES = 6  # that are told one by one


def make_sections(groups: Sequence[Sequence[Run]], trace_bytes: int) -> list[Section]:
    """groups: of `comparable`. trace_bytes: of all traces in the page together."""
    traced = [run for runs in groups for run in runs if run.kind == "bench" and (run.path / TRACE).exists()]
    each = share(trace_bytes, traced)
    names: set[str] = set()
    sections = []
    for runs in groups:
        made = _bench_section(runs, each) if runs[0].kind == "bench" else _study_section(runs[0])
        name = made.name
        while made.name in names:
            made = dataclasses.replace(made, name=f"{name}-{len(names)}")
        names.add(made.name)
        sections.append(made)
    return sections


def _bench_section(runs: Sequence[Run], trace_bytes: int) -> Section:
    figures: list[Figure | Drawn] = list(bench_figures(runs))
    for temperature in temperatures(runs[0]):
        rows = speeds(runs, temperature)
        methods = list(dict.fromkeys(row["method"] for row in rows))
        if len(methods) > 1:
            several = f" at {mode(temperature)}" if len(temperatures(runs[0])) > 1 else ""
            note = "One point a prompt; above the dashed line the method along y is faster. Choose both below."
            name, title = f"against-t{temperature:g}", f"Method against method{several}"
            figures.insert(-1, Drawn(name, title, against(rows, methods), note))
    traces = [viewer_data(run.path, trace_bytes) for run in runs]
    viewer = next((trace for trace in traces if trace is not None), None)
    return dataclasses.replace(_section(runs), figures=figures, viewer=viewer, warnings=_failures(runs))


def _study_section(run: Run) -> Section:
    return dataclasses.replace(_section([run]), figures=list(from_json(run.results.get("figures", []))))


def _section(runs: Sequence[Run]) -> Section:
    """All but the figures."""
    kind, named = runs[0].kind, ", ".join(run.name for run in runs)
    return Section(
        name=re.sub(r"[^A-Za-z0-9_-]+", "-", f"{kind}-{runs[0].name}").strip("-"),
        title=f"{TITLES.get(kind, kind)} · {named}",
        about=about(runs[0]),
        figures=(),
        facts=[fact for run in runs for fact in facts(run, run.name if len(runs) > 1 else "")],
        commands=[str(run.meta["command"]) for run in runs if run.meta.get("command")],
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
        parts.append(" and ".join(mode(value) for value in temperatures(run)))
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
