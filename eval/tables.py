"""results.json as tables: on the screen and in Markdown. Pure functions of its content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from draftsmith.data.markdown import markdown_lines

HEADINGS = ("method", "tokens/s", "speed-up", "95 % CI", "tau", "target calls", "discarded", "= ar")
METHOD_WIDTH = 12  # narrower terminals fold a method's name, not the numbers


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One method's row, in the order of HEADINGS."""
    interval = row.get("speedup_ci95")
    drafts = row["num_draft_tokens"] > 0
    return (
        row["method"],
        f"{row['tokens_per_s']:,.1f}",
        f"{row['speedup']:.2f}x",
        f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
        f"{row['tau']:.2f}",
        f"{row['num_target_calls']:,}",
        f"{row['discard_rate']:.0%}" if drafts else "",
        verdict(row),
    )


def verdict(row: Mapping[str, Any]) -> str:
    """Whether the greedy output equals the autoregressive one; `-` where that is no fair test."""
    matches = row.get("matches_ar")
    if matches is None:
        return "-"
    return "yes" if matches else f"no ({row.get('num_differing', '?')})"


def caption(results: Mapping[str, Any]) -> str:
    """How the numbers were taken, in one sentence."""
    meta, first = results["meta"], results["methods"][0]
    settings = meta["settings"]
    mode = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    clock = "CPU time" if meta["clock"] == "cpu" else "wall time"
    batch_size = settings.get("batch_size", 1)  # results of earlier versions do not say
    together = f"{batch_size} prompts at a time, " if batch_size > 1 else ""
    repeats = "once" if settings["repeats"] == 1 else f"medians of {settings['repeats']}"
    grams = first.get("distinct_4grams")
    return (
        f"{first['prompts']} prompts, {first['tokens']:,} tokens"
        + (f" (distinct 4-grams {grams:.2f})" if grams is not None else "")
        + f", {mode}, {settings['dtype']} on {settings['device']}, {settings['num_threads']} thread(s), "
        f"{together}{clock}, interleaved, {repeats}; speed-up over this engine's own ar."
    )


def plain_table(**kwargs: Any) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **kwargs)


def results_table(results: Mapping[str, Any]) -> Table:
    """Fits in 100 columns with room for a name, and in 80 with folded names."""
    table = plain_table(caption=caption(results), caption_justify="left")
    table.add_column(HEADINGS[0], overflow="fold", min_width=METHOD_WIDTH)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    fastest = max(row["speedup"] for row in results["methods"])
    for row in results["methods"]:
        table.add_row(*cells(row), style="bold" if row["speedup"] == fastest else None)
    return table


def task_table(results: Mapping[str, Any]) -> Table | None:
    """Speed-up of every method on every task, with a column for whichever are fewer; None where prompts carry no
    tasks."""
    rows = [row for row in results["methods"] if row.get("by_task")]
    if not rows:
        return None
    if len(rows) - 1 > len(rows[0]["by_task"]):
        return methods_by_task(rows)
    table = plain_table(title="Speed-up by task", title_justify="left", title_style="bold")
    table.add_column("task", overflow="fold", min_width=METHOD_WIDTH)
    table.add_column("prompts", justify="right", no_wrap=True)
    table.add_column("distinct 4-grams", justify="right")
    for row in rows[1:]:
        table.add_column(row["method"], justify="right", overflow="fold")
    for task, baseline in rows[0]["by_task"].items():
        grams = baseline["distinct_4grams"]
        parts = [row["by_task"][task] for row in rows[1:]]
        shown = (f"{part['speedup']:.2f}x" for part in parts)
        table.add_row(task, str(baseline["prompts"]), "" if grams is None else f"{grams:.2f}", *shown)
    return table


def methods_by_task(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each method, a column for each task, headed by its number of prompts and its distinct 4-grams."""
    table = plain_table(title="Speed-up by task (prompts; distinct 4-grams)", title_justify="left", title_style="bold")
    table.add_column("method", overflow="fold", min_width=METHOD_WIDTH)
    for task, baseline in rows[0]["by_task"].items():
        grams = baseline["distinct_4grams"]
        about = f"({baseline['prompts']}" + (")" if grams is None else f"; {grams:.2f})")
        table.add_column(f"{task.replace('_', ' ')} {about}", justify="right")
    for row in rows[1:]:
        table.add_row(row["method"], *(f"{part['speedup']:.2f}x" for part in row["by_task"].values()))
    return table


def markdown_table(results: Mapping[str, Any]) -> str:
    """The same table for a README or a model card, with its caption."""
    lines = markdown_lines(HEADINGS, [cells(row) for row in results["methods"]])
    return "\n".join([*lines, "", caption(results)]) + "\n"
