"""Benchmarks as figures: the table of speed-up and tau by task (EAGLE-2, table 1), counts, and the rows of charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftsmith.eval.report.draw_bench import DRAWINGS, against
from draftsmith.eval.report.drawing import Chart, Drawing, chart
from draftsmith.eval.report.runs import Run, prompt_rows, temperature_of, temperatures
from draftsmith.eval.report.tables import Column, Table, interval

Row = dict[str, Any]


def bench_figures(runs: Sequence[Run]) -> list[Table | Chart]:
    """runs: comparable ones, with the same temperatures."""
    rows = labelled(runs)
    found: list[Table | Chart] = []
    for temperature in temperatures(runs[0]):
        found.append(headline([row for row in rows if row["T"] == temperature], temperature, len(runs) > 1))
    return [*found, *charts(rows), *paired_charts(runs), counts(rows)]


def labelled(runs: Sequence[Run]) -> list[Row]:
    """Rows of all methods with `T`, `run`, and `label`: the method, and its run where several have it."""
    rows = [{**row, "T": temperature_of(run, row), "run": run.name} for run in runs for row in run.results["methods"]]
    seen: dict[tuple[str, float], int] = defaultdict(int)
    for row in rows:
        seen[row["method"], row["T"]] += 1
    for row in rows:
        row["label"] = row["method"] + (f" ({row['run']})" if seen[row["method"], row["T"]] > 1 else "")
    return rows


def tasks_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.get("by_task") or {}))


def mode(temperature: float) -> str:
    return "T = 0 (greedy)" if temperature == 0 else f"T = {temperature:g}"


def headline(rows: Sequence[Row], temperature: float, several: bool) -> Table:
    """Methods by tasks, each with speed-up and tau, and both over all prompts with their intervals."""
    tasks = tasks_of(rows)
    overall = "all prompts"
    columns = [Column("method", "method"), *([Column("run", "run")] if several else [])]
    columns += [Column("speedup", "speed-up", ".2fx", overall), Column("speedup_ci", "95 % CI", "", overall)]
    columns += [Column("tau", "τ", ".2f", overall), Column("tau_ci", "95 % CI", "", overall)]
    if any(row.get("macro_speedup") is not None for row in rows):
        mean = "mean of tasks"
        columns += [Column("macro_speedup", "speed-up", ".2fx", mean), Column("macro_tau", "τ", ".2f", mean)]
    for task in tasks:
        columns += [Column(f"speedup {task}", "speed-up", ".2fx", task), Column(f"tau {task}", "τ", ".2f", task)]
    table_rows = []
    for row in rows:
        shown = {"method": row["method"], "run": row["run"], "speedup": row.get("speedup"), "tau": row.get("tau")}
        shown |= {f"macro_{name}": row.get(f"macro_{name}") for name in ("speedup", "tau")}
        shown |= {f"{name}_ci": interval(row.get(f"{name}_ci95")) for name in ("speedup", "tau")}
        for task, part in (row.get("by_task") or {}).items():
            shown |= {f"{name} {task}": part.get(name) for name in ("speedup", "tau")}
        table_rows.append(shown)
    note = (
        "Speed-up over this engine's own autoregressive decoding in the same run; τ: emitted tokens per target call, "
        "the bonus token included. Over all prompts: ratios of sums, with bootstrap intervals over prompts."
    )
    if any(column.key == "macro_tau" for column in columns):
        note += " Mean of tasks, as papers have it: each task counts alike, however long its answers."
    name = f"headline-t{temperature:g}"
    return Table(name, f"Speed-up and τ at {mode(temperature)}", columns, table_rows, note)


def counts(rows: Sequence[Row]) -> Table:
    """What was counted, and whether the output is the target's own."""
    columns = [Column("T", "T", "g"), Column("label", "method"), Column("prompts", "prompts", ",")]
    columns += [Column("tokens", "tokens", ","), Column("tokens_per_s", "tokens/s", ",.1f")]
    columns += [Column("num_target_calls", "target calls", ","), Column("num_draft_tokens", "drafted", ",")]
    columns += [Column("num_accepted", "accepted", ","), Column("discard_rate", "discarded", ".0%")]
    columns += [Column("verification_rate", "verified", ".2f"), Column("equal", "= ar")]
    columns += [Column("failures", "failures", ",")] if any("failures" in row for row in rows) else []
    shown = [{**row, "equal": _equal(row), "failures": _number(row.get("failures"))} for row in rows]
    note = (
        "discarded: drafted tokens that were not emitted, by emitted tokens. verified: target calls by emitted "
        "tokens. = ar: in greedy float32 decoding, whether every answer equals the autoregressive one."
    )
    return Table("counts", "What was counted", columns, shown, note)


def _equal(row: Mapping[str, Any]) -> str:
    if row.get("matches_ar") is None:
        return "–"
    return "yes" if row["matches_ar"] else f"no ({row.get('num_differing', '?')})"


def _number(failures: Any) -> Any:
    """Failures as a count, where they are listed by prompt."""
    return len(failures) if isinstance(failures, list | dict) else failures


def charts(rows: Sequence[Row]) -> list[Chart]:
    by_task = [
        {"method": row["label"], "task": task, "temperature": mode(row["T"]), **_rates(part)}
        for row in rows
        for task, part in (row.get("by_task") or {}).items()
    ]
    overall = [_overall(row) for row in rows]
    shown = {"speedup": overall, "tau-and-speedup": overall, "speedup-by-task": by_task, "tau-by-task": by_task}
    return [chart(name, DRAWINGS[name], own) for name, own in shown.items() if own]


def paired_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Method against method, a chart a temperature, where prompts were kept."""
    for temperature in temperatures(runs[0]):
        rows = speeds(runs, temperature)
        if len({row["method"] for row in rows}) > 1:
            several = f" at {mode(temperature)}" if len(temperatures(runs[0])) > 1 else ""
            note = "One point a prompt; above the dashed line the method along y is faster. Choose both below."
            yield chart(f"against-t{temperature:g}", Drawing(f"Method against method{several}", against, note), rows)


def _overall(row: Row) -> Row:
    low, high = row.get("speedup_ci95") or (None, None)
    ends = {"low": _short(low), "high": _short(high)}
    return {"method": row["label"], "temperature": mode(row["T"]), **_rates(row), **ends}


def _rates(row: Mapping[str, Any]) -> Row:
    names = ("speedup", "tau", "tokens_per_s")
    return {**{name: _short(row.get(name)) for name in names}, "prompts": row.get("prompts")}


def _short(value: float | None) -> float | None:
    """Five significant digits: what a chart can show."""
    return None if value is None else float(f"{value:.5g}")


def speeds(runs: Sequence[Run], temperature: float) -> list[Row]:
    """Tokens per second of every method on every prompt, its turns together: rows of `against`."""
    rows = []
    for run in runs:
        clock = "cpu_s" if run.meta.get("clock") == "cpu" else "wall_s"
        # Files of several tasks may number their prompts alike.
        sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in prompt_rows(run):
            if temperature_of(run, row) == temperature and row.get(clock) and row.get("tokens"):
                total = sums[row["method"], row.get("task") or "prompts", str(row["id"])]
                total[0] += row["tokens"]
                total[1] += row[clock]
        several = f" ({run.name})" if len(runs) > 1 else ""
        for (method, task, prompt), (tokens, seconds) in sums.items():
            speed = _short(tokens / seconds)
            rows.append({"method": method + several, "prompt": prompt, "task": task, "tokens_per_s": speed})
    return rows
