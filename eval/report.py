"""`draftsmith eval report`: runs as one HTML page that loads nothing and has no script.

A run has its verdicts, its tables, its curves, and the answers whose rounds were traced. A token is colored by how it
came:

    accepted    a drafted token that the target accepted
    bonus       the target's own token after a fully accepted draft
    correction  the target's own token in place of a rejected one
    alone       the target's own token where nothing was drafted, also the prefill's
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.console import Column, Table, format_interval, merged, print_text
from draftsmith.data.store.writer import is_written
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.bench.tables import mode, results_tables
from draftsmith.eval.bench.trace import TEXTS, TRACE
from draftsmith.eval.meta import MEASURE, RESULTS, read_results
from draftsmith.eval.settings import ReportConfig
from draftsmith.eval.tables import drawn_data, from_json, heading_groups, to_json
from draftsmith.modules.drafters import HEADS
from draftsmith.modules.pretrained.files import make_directory, write_text
from draftsmith.modules.pretrained.provenance import flatten
from draftsmith.modules.pretrained.reading import (
    REMEDY,
    check_shape,
    metric_rows,
    read_lines,
    read_object,
    read_text,
)
from draftsmith.modules.types import InputError

Row = Mapping[str, Any]
SHAPE: dict[str, Any] = {
    "meta": {f"{name}?": (dict, None) for name in ("settings", "hardware", "prompts", "versions", "models")},
    "methods?": [{"method": str, "temperature": float, "by?": {"*": [dict]}}],
    "tables?": [{"name": str, "columns?": [{"key": str, "title": str}], "rows?": [dict]}],
}
METRICS, SETTINGS, FINISHED = "metrics.csv", "config.yaml", "training.json"  # of a training
# Curves of a training: title -> metrics, by the name in whose place a group stands.
CURVES = {
    "Loss by steps": r"(train|val)/loss",
    "tau of held-out prompts by steps": r"val/(tau)",
    "Accepted by place, by steps": r"val/accepted_(\d+)",
    "Tokens a second by steps": r"cost/(tokens_per_s)",
}
LOAD = "Tokens a second by requests at once"  # the curve of a server
TITLES = {"bench": "Benchmark", "certify": "Certificate", "replay": "Replayed answers", "served": "In a server"}
TITLES |= {"training": "Training"}
TRACE_BYTES = 2_600_000  # of trace lines for all runs together: the page stays under 5 MB
MAX_FAILURES = 6  # listed one by one
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 52, 22  # of a chart; room for the numbers of its axes
NODE = {"q": "q", "head": "head", "accept_prob": "P(accept)"}  # numbers of a drafted token -> their names


def run(config: ReportConfig) -> Path:
    """Write the page and return its path.

    Raises:
        InputError: a directory is not a run.
    """
    runs = read_runs(config.runs)
    traced = [one for one in runs if (one.path / TRACE).exists()]
    sections = [section_of(one, TRACE_BYTES // max(1, len(traced))) for one in runs]
    output = config.output
    assert output is not None
    make_directory(output.parent)
    write_text(output, render(sections))
    print_text(f"Written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return output


def render(sections: Sequence[Row]) -> str:
    """Render the page; everything except this project's own template is escaped, and no script would run."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("draftsmith.eval") / "report.html.jinja").read_text("utf-8"))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return template.render(sections=sections, date=date, merged=merged, heading_groups=heading_groups)


# -- runs


@dataclass(frozen=True)
class Run:
    """A run's directory and results; its name is the directory's, with the parent's if another run has the same."""

    path: Path
    name: str
    results: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.results["meta"]

    @property
    def kind(self) -> str:
        return str(self.meta.get("kind", "bench"))

    @property
    def temperatures(self) -> list[float]:
        """Temperatures of a bench's rows, ascending."""
        return sorted({row["temperature"] for row in self.results.get("methods", [])})


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read finished runs, and trainings as far as they are.

    Raises:
        InputError: a path without complete results, or with results of something else.
    """
    directories = [path.parent if path.name == RESULTS else path for path in paths]
    resolved = [path.resolve() for path in directories]
    if twice := [path for number, path in enumerate(directories) if resolved[number] in resolved[:number]]:
        raise InputError("runs", f"{twice[0]} twice", "each run once", "Name it once.")
    seen = Counter(path.name for path in resolved)
    names = [path.name if seen[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in resolved]
    return [Run(path, name, checked_results(path)) for path, name in zip(directories, names, strict=True)]


def checked_results(directory: Path) -> Mapping[str, Any]:
    """Read and check results.json, or a training's metrics in the same form."""
    if (directory / METRICS).is_file():
        return read_training(directory)
    results = read_results(directory, SHAPE)
    if not results.get("methods") and not results.get("tables"):
        raise InputError(str(directory / RESULTS), "nothing measured", "rows of a method or a table", MEASURE)
    return results


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
    command = f"draftsmith {kind[1]} --config {shlex.quote(str(path))}" if kind else None
    step = max((row["step"] for row in rows), default=0)
    if (directory / FINISHED).exists():
        status = f"Finished after {step:,.0f} steps."
    elif is_written(directory):
        status = f"Running: step {step:,.0f} is the last one logged."
    else:
        status = f"Interrupted: step {step:,.0f} is the last one logged. The same command continues."
    curves = {title: points_of(rows, pattern) for title, pattern in CURVES.items()}
    tables = [latest(rows), *(drawn_data(title, points) for title, points in curves.items() if points)]
    changed = datetime.datetime.fromtimestamp((directory / METRICS).stat().st_mtime, datetime.UTC)
    meta = {"kind": "training", "settings": settings, "command": command, "status": status}
    meta["date"] = changed.strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"meta": meta, "tables": to_json(tables), "summary": {"step": step}}


def points_of(rows: Sequence[Row], pattern: str) -> list[Row]:
    """Return the points of one of CURVES."""
    return [
        {"at_step": row["step"], "series": found[1], "value": value}
        for row in rows
        for key, value in row.items()
        if (found := re.fullmatch(pattern, key))
    ]


def latest(rows: Sequence[Row]) -> Table:
    """Return the table of every metric's last value, its step, and its range."""
    values: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key in row.keys() - {"step"}:
            values.setdefault(key, []).append((row["step"], row[key]))
    lines = []
    for key in sorted(values):
        (step, value), own = values[key][-1], [value for _, value in values[key]]
        lines.append({"metric": key, "value": value, "step": step, "lowest": min(own), "highest": max(own)})
    columns = [Column("metric", "metric"), Column("value", "latest", ".4g"), Column("step", "at step", ",.0f")]
    columns += [Column("lowest", "lowest", ".4g"), Column("highest", "highest", ".4g")]
    return Table("training-latest", "Latest numbers", columns, lines)


# -- a section of the page


def section_of(one: Run, trace_bytes: int) -> dict[str, Any]:
    """Return what the page shows of a run; its traced answers take at most `trace_bytes` of trace lines."""
    bench = one.kind == "bench"
    tables = results_tables({"failures": (), **one.results}) + [counts(one)] if bench else from_json(one.results)
    shown: list[Table | dict[str, Any]] = []
    for table in tables:
        if table.rows and {"at_step", "series", "value"} <= table.rows[0].keys():
            # One step is a dot: its numbers stand in a table.
            if len({row["at_step"] for row in table.rows}) > 1:
                shown.append(chart(LOAD if table.name == "served-load" else table.name, table.rows))
        elif table.columns:
            shown.append(table)
        elif table.rows:
            columns = [Column(key, key) for key in dict.fromkeys(key for row in table.rows for key in row)]
            shown.append(dataclasses.replace(table, title=table.title or table.name, columns=columns))
    return {
        "title": f"{TITLES.get(one.kind, one.kind)} · {one.name}",
        "about": about(one),
        "verdicts": verdicts(one) if bench else [],
        "warnings": failures(one),
        "figures": shown,
        "prompts": traced_prompts(one.path, trace_bytes),
        "command": str(one.meta.get("command") or ""),
        "facts": facts(one),
    }


def verdicts(one: Run) -> list[str]:
    """Return sentences for each temperature: what is faster than the target alone, and whether answers are its own.

    A method whose interval holds 1 is not called faster. Heads that were trained are named, also where they lose.
    """
    lines = list[str]()
    for temperature in one.temperatures:
        rows = [row for row in one.results["methods"] if row["temperature"] == temperature]
        others = [row for row in rows if row["method"] != BASELINE]
        best = max(others, key=lambda row: row["speedup"], default=None)
        if best is None:
            continue
        heads = [row for row in others if uses_head(row["method"])]
        text = f"{mode(temperature).capitalize()}: {speed_text(best)}"
        if heads and best not in heads:
            text += f"; of the heads, {speed_text(max(heads, key=lambda row: row['speedup']))}"
        if unequal := [row["method"] for row in rows if row["matches_ar"] is False]:
            text += f". Answers of {', '.join(unequal)} differ from the target's"
        elif best["matches_ar"]:
            text += "; every answer of every method is the target's own"
        lines.append(f"{text}.")
    return lines


def uses_head(method: str) -> bool:
    """Return whether a method drafts with a trained head."""
    return method.partition(":")[0].partition("@")[0].partition("-")[0] in HEADS or "drafter=" in method


def speed_text(row: Row) -> str:
    """Say how fast a method is, as far as its interval goes."""
    low, high = row["speedup_ci95"] or (0.0, float("inf"))
    interval = format_interval(row["speedup_ci95"], between=" to ") or "one prompt, no interval"
    claim = "is faster" if low > 1 else "is slower" if high < 1 else "is neither faster nor slower for certain"
    return (
        f"{row['method']} {claim} than the target alone: {row['speedup']:.2f} times ({interval}), "
        f"{row['tokens_per_s']:,.1f} tokens/s, tau {row['tau']:.2f}"
    )


def counts(one: Run) -> Table:
    """Return the table of what was counted."""
    columns = [Column("temperature", "T", "g"), Column("method", "method"), Column("prompts", "answers", ",")]
    columns += [Column("tokens", "tokens", ","), Column("num_target_calls", "target calls", ",")]
    columns += [Column("num_draft_tokens", "drafted", ","), Column("num_accepted", "accepted", ",")]
    columns += [Column("copied_prompt", "of the prompt", ".0%", "copied")]
    columns += [Column("copied_answer", "of an answer", ".0%", "copied")]
    note = (
        "copied: tokens that continue a repetition (they and the three before them occurred earlier in the prompt or "
        "the answer); such text is easier to draft."
    )
    return Table("counts", "Counts", columns, one.results["methods"], note)


def about(one: Run) -> str:
    """Return one sentence on what was measured: models, prompts, sampling, machine and date."""
    meta, settings = one.meta, one.meta.get("settings") or {}
    prompts, hardware = meta.get("prompts") or {}, meta.get("hardware") or {}
    parts = [f"Target {settings.get('target', 'not named')}"]
    if drafts := settings.get("head"):
        parts.append(f"draft {drafts if isinstance(drafts, str) else ', '.join(drafts)}")
    if prompts:
        parts.append(f"{prompts.get('count', '?')} prompts of {prompts.get('source', 'an unnamed source')}")
    if one.temperatures:
        parts.append(" and ".join(mode(value) for value in one.temperatures))
    if settings.get("dtype"):
        parts.append(f"{settings['dtype']} on {settings.get('device', 'cpu')}")
    if machine := hardware.get("gpu") or hardware.get("cpu"):
        parts.append(f"{machine}, {hardware.get('torch_threads', '?')} CPU thread(s)")
    if meta.get("clock"):
        parts.append("CPU time" if meta["clock"] == "cpu" else "wall time")
    if status := meta.get("status"):  # a training
        return " ".join([status, *(["; ".join(parts) + "."] if settings else [])])
    return "; ".join(parts) + f". Measured {str(meta.get('date', 'at an unknown date'))[:10]}."


def facts(one: Run) -> list[tuple[str, str]]:
    """Return what results.json records of the run."""
    names = ("settings", "versions", "hardware", "target", "models", "prompts", "date", "seed", "git_commit", "clock")
    recorded = {"numbers": one.results.get("summary"), "directory": str(one.path)}
    recorded |= {name: one.meta.get(name) for name in names}
    flat = flatten({key: value for key, value in recorded.items() if value is not None})

    def text(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)

    return [(key, text(value)) for key, value in flat.items() if value not in (None, "", [])]


def failures(one: Run) -> list[str]:
    """Return a line for each prompt that was not measured, at any temperature; the last one counts the rest."""
    lines = dict.fromkeys(
        f"Not measured: {failure['task'] or 'prompt'}, {failure['id']}: {failure['error']}"
        for failure in one.results.get("failures") or []
    )
    rest = len(lines) - MAX_FAILURES
    more = [f"{rest} more prompts were not measured: see results.json."] if rest > 0 else []
    return [*list(lines)[:MAX_FAILURES], *more]


def chart(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a line chart of points {at_step, series, value} at several steps: paths by series, and the axes' ends."""
    points = [(row["at_step"], row["value"]) for row in rows if row["value"] is not None]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    by_series: dict[str, list[str]] = {}
    for row in rows:
        if row["value"] is not None:
            x = LEFT + (WIDTH - LEFT - 8) * (row["at_step"] - left) / (right - left)
            y = 8 + (HEIGHT - BOTTOM - 8) * (high - row["value"]) / ((high - low) or 1)
            by_series.setdefault(row["series"], []).append(f"{x:.1f},{y:.1f}")
    paths = [(name, " ".join(places)) for name, places in by_series.items()]
    numbers = {"left": left, "right": right, "low": low, "high": high}
    ends = {name: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" for name, value in numbers.items()}
    return {"title": title, "paths": paths, "width": WIDTH, "height": HEIGHT, "x": LEFT, "y": HEIGHT - BOTTOM, **ends}


# -- answers, token by token


def kinds(line: Row) -> list[str]:
    """Return the kind of each emitted token of a round."""
    emitted, path = line["emitted"], list(line.get("accepted", ()))
    if line.get("prefill") or not line.get("drafted"):
        return ["alone"] * len(emitted)
    found = ["accepted"] * min(len(path), len(emitted))
    if len(emitted) > len(found):
        last = path[-1] if path else -1
        found.append("correction" if last in line["parents"] else "bonus")
    return found


def traced_prompts(directory: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the prompts of a run that the page shows, with all their traced answers; none if rounds were not traced.

    They are taken from the tasks in turn, as long as their lines fit into `max_bytes`.
    """
    if not (directory / TRACE).exists() or not (directory / TEXTS).exists():
        return []
    again = "Delete it, and measure again with --traces."
    texts = read_object(directory / TEXTS, {"prompts": dict, "tokens": dict}, again)
    sizes, tasks = dict[tuple[int, int], int](), dict[tuple[int, int], str]()
    for line in read_lines(directory / TRACE, {}, again):
        prompt = line["prompt"], line["turn"]
        tasks[prompt], sizes[prompt] = line["task"] or "", sizes.get(prompt, 0) + len(json.dumps(line))
    chosen = shown_prompts(sizes, tasks, max_bytes)
    shown = {prompt: {"text": texts["prompts"].get(f"{prompt[0]}/{prompt[1]}", ""), "answers": {}} for prompt in chosen}
    for line in read_lines(directory / TRACE, {}, again):
        if (own := shown.get((line["prompt"], line["turn"]))) is not None:
            turn = f", turn {line['turn']}" if line["turn"] > 1 else ""
            own["title"] = f"{line['task'] or ''} {line['id']}{turn}".strip()
            named = f"{line['method']}, {mode(line['temperature'])}"
            answer = own["answers"].setdefault(named, {"tokens": [], "rounds": 0})
            answer["tokens"] += shown_tokens(line, answer["rounds"], texts["tokens"])
            answer["rounds"] += 1
    return list(shown.values())


def shown_tokens(line: Row, number: int, texts: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a round's tokens as (kind, text, what is said of it), with those that were drafted and not kept."""

    def text(token: int) -> str:
        return texts.get(str(token), f"<{token}>")

    def about(node: int) -> str:
        known = ((NODE[key], line[key][node : node + 1]) for key in NODE if line.get(key))
        return "".join(f", {name} {values[0]:.3g}" for name, values in known if values and values[0] is not None)

    drafted, path = line.get("drafted") or [], list(line.get("accepted", ()))
    times = f"target {1000 * line['target_s']:.3g} ms" if line.get("target_s") is not None else ""
    times += f", drafting {1000 * line['draft_s']:.3g} ms" if line.get("draft_s") is not None else ""
    said = f"round {number}: {len(drafted)} drafted, {len(path)} accepted; {times}".removesuffix("; ")
    lost = [node for node in range(len(drafted)) if node not in path]
    for place, (token, kind) in enumerate(zip(line["emitted"], kinds(line), strict=True)):
        if kind != "accepted":
            yield from (("discarded", text(drafted[node]), f"thrown away{about(node)}") for node in lost)
            lost = []
        yield kind, text(token), f"{kind}{about(path[place]) if kind == 'accepted' else ''}\n{said}"
    yield from (("discarded", text(drafted[node]), f"thrown away{about(node)}") for node in lost)


def shown_prompts(
    sizes: Mapping[tuple[int, int], int], tasks: Mapping[tuple[int, int], str], max_bytes: int
) -> list[tuple[int, int]]:
    """Choose prompts that fit, the first of every task before the second of any."""
    by_task: dict[str, list[tuple[int, int]]] = {}
    for prompt in sizes:
        by_task.setdefault(tasks[prompt], []).append(prompt)
    chosen, left = [], max_bytes
    for prompt in itertools.chain.from_iterable(itertools.zip_longest(*by_task.values())):
        if prompt is not None and sizes[prompt] <= left:
            chosen.append(prompt)
            left -= sizes[prompt]
    return chosen
