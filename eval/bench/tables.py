"""results.json as tables: on the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.data.console import Column, Table, format_interval, print_table
from draftsmith.data.text.repetition import Repetition
from draftsmith.eval.bench.fidelity import fidelity_of
from draftsmith.modules.drafters.methods import LOSSY

COLUMNS = (
    Column("method", "method"),
    Column("tokens_per_s", "tokens/s", ",.1f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI", below=True),
    Column("tau", "tau", ".2f"),
    Column("tau_ci", "95 % CI", below=True),
    Column("discarded", "discarded", ".0%"),
    Column("equal", "= ar"),
)
POOLED, MACRO = "all, pooled", "mean of tasks"
RATES, SPEED_BENCH = ("speedup", "tau"), "speed_bench_tau"  # keys of a row
SHOWN_FAILURES = 5


def results_tables(results: Mapping[str, Any]) -> list[Table]:
    """For each temperature the methods; then what they make of text that copies and of other text; then, where prompts
    are of several tasks, the methods by task."""
    temperatures = temperatures_of(results)
    found = []
    for number, temperature in enumerate(temperatures, start=1):
        rows = rows_at(results, temperature)
        fastest = max(row["speedup"] for row in rows if not row["method"].endswith(LOSSY))  # ar is always there
        shown = [{**row, **cells(row), "fastest": row["speedup"] == fastest} for row in rows]
        title = mode(temperature).capitalize()
        found.append(Table("methods", title, COLUMNS, shown, caption(results) if number == len(temperatures) else ""))
    first = results["methods"][0]
    several = len(first.get("by_task", ())) > 1 or SPEED_BENCH in first
    apart = [by_repetition(results, temperature) for temperature in temperatures]
    tasks = [by_task(results, temperature) for temperature in temperatures if several]
    return [*found, *(table for table in (*apart, *tasks) if table is not None)]


def show_results(table: Table) -> None:
    """One of `results_tables` on the screen."""
    print_table(table, bold="fastest")


def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row's cells hold that is not a number of it."""
    matches = row.get("matches_ar")  # None where it is no fair test
    equal = "-" if matches is None else "yes" if matches else f"no ({row.get('num_differing', '?')})"
    return {
        "speedup_ci": format_interval(row.get("speedup_ci95")),
        "tau_ci": format_interval(row.get("tau_ci95")),
        "discarded": row["discard_rate"] if row["num_draft_tokens"] else None,
        "equal": equal,
    }


def temperatures_of(results: Mapping[str, Any]) -> list[float]:
    """The temperatures in the order measured."""
    single = results["meta"]["settings"]["temperature"]  # rows of earlier versions do not say
    return list(dict.fromkeys(row.get("temperature", single) for row in results["methods"]))


def rows_at(results: Mapping[str, Any], temperature: float) -> list[Mapping[str, Any]]:
    """Rows of one temperature."""
    return [row for row in results["methods"] if row.get("temperature", temperature) == temperature]


def mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def caption(results: Mapping[str, Any]) -> str:
    """How the numbers were taken, in one sentence, and what is missing."""
    meta, first = results["meta"], results["methods"][0]
    settings = meta["settings"]
    modes = " and ".join(mode(temperature) for temperature in temperatures_of(results))
    clock = "CPU time" if meta["clock"] == "cpu" else "wall time"
    batch_size = settings.get("batch_size", 1)  # results of earlier versions do not say
    together = f"{batch_size} prompts at a time, " if batch_size > 1 else ""
    repeats = "once" if settings["repeats"] == 1 else f"medians of {settings['repeats']}"
    return (
        f"{first['prompts']} prompts, {first['tokens']:,} tokens{repetition_of(first)}, {modes}, "
        f"{in_precision(settings)} on {settings['device']}, {settings['num_threads']} thread(s), "
        f"{together}{clock}, interleaved, {repeats}; speed-up over this engine's own ar."
        + costs_of(meta)
        + fidelity_of(meta)
        + lossy_of(results)
        + left_out(results)
    )


def in_precision(settings: Mapping[str, Any]) -> str:
    """The type of the weights, and what target and drafts have in its place; earlier versions had nothing else."""
    parts = {part: settings.get(f"{part}_precision", "dtype") for part in ("target", "draft")}
    return ", ".join([settings["dtype"], *(f"{part} in {own}" for part, own in parts.items() if own != "dtype")])


def repetition_of(row: Mapping[str, Any]) -> str:
    """How much of a row's text repeats, in brackets; results of earlier versions do not say all of it."""
    grams, found = row.get("distinct_4grams"), []
    if "copied_prompt" in row:
        found.append(Repetition(row["copied_prompt"], row["copied_answer"]).text())
    if grams is not None:
        found.append(f"distinct 4-grams {grams:.2f}")
    return f" ({'; '.join(found)})" if found else ""


def by_repetition(results: Mapping[str, Any], temperature: float) -> Table | None:
    """Tau of every method that drafts, apart for rounds that begin within a repetition and for others; None without
    such a method, or in results of earlier versions."""
    rows = [row for row in rows_at(results, temperature) if row["num_draft_tokens"] and "tau_copying" in row]
    if not rows:
        return None
    columns = [
        Column("method", "method"),
        Column("tau", "tau", ".2f"),
        Column("tau_copying", "copying", ".2f"),
        Column("tau_new", "other text", ".2f"),
    ]
    note = (
        "copying: tau of the rounds whose first token goes on with a repetition (it and the three before it have stood "
        "in prompt or answer before). other text: of all other rounds. Both without prefills."
    )
    return Table(f"copying-t{temperature:g}", f"Tau where the text copies, {mode(temperature)}", columns, rows, note)


def costs_of(meta: Mapping[str, Any]) -> str:
    """What c=auto came to; nothing where no method asked."""
    costs = meta.get("step_costs") or {}
    return f" c by {', '.join(f'{name}: {c:.3g}' for name, c in costs.items())}." if costs else ""


def lossy_of(results: Mapping[str, Any]) -> str:
    """What the mark of some methods means; nothing where none has it."""
    marked = any(row["method"].endswith(LOSSY) for row in results["methods"])
    return f" A method that is{LOSSY} answers with another distribution than the target's." if marked else ""


def left_out(results: Mapping[str, Any]) -> str:
    """Which prompts have failed; nothing where none has."""
    found = (f"{failure['task']} {failure['id']}".strip() for failure in results.get("failures", ()))
    names = list(dict.fromkeys(found))
    if not names:
        return ""
    more = ", ..." if len(names) > SHOWN_FAILURES else ""
    return f" Left out because they failed ({len(names)}): {', '.join(names[:SHOWN_FAILURES])}{more}."


def by_task(results: Mapping[str, Any], temperature: float) -> Table | None:
    """Speed-up and tau of every method on every task, and over tasks, as in table 1 of EAGLE-2; None where prompts
    carry no tasks."""
    baseline, *rows = rows_at(results, temperature)
    tasks = baseline.get("by_task")
    if not rows or not tasks:
        return None
    titles = {**{task: task.replace("_", " ") for task in tasks}, "pooled": POOLED, "macro": MACRO}
    speed_bench = SPEED_BENCH in baseline
    columns = [Column("method", "method")]
    for key, title in titles.items():
        columns += [Column(f"{key}.speedup", title, ".2fx"), Column(f"{key}.tau", f"{title}: tau", ".2f", below=True)]
        if speed_bench and key != "pooled":
            columns.append(Column(f"{key}.{SPEED_BENCH}", f"{title}: SPEED-Bench's AL", ".2f", below=True))
    shown = []
    for row in rows:
        macro = {name: row.get(f"macro_{name}") for name in ("speedup", "tau")} | {SPEED_BENCH: row.get(SPEED_BENCH)}
        parts = {**row["by_task"], "pooled": row, "macro": macro}
        numbers = {f"{key}.{name}": part.get(name) for key, part in parts.items() for name in (*RATES, SPEED_BENCH)}
        shown.append({"method": row["method"], **numbers})
    counts = ", ".join(f"{task} {part['prompts']}{repetition_of(part)}" for task, part in tasks.items())
    note = (
        f"{POOLED}: ratio of sums over the prompts of all tasks. {MACRO}: mean over tasks, each counting alike. "
        f"Prompts of the tasks (and the tokens of ar's answers): {counts}."
    )
    if speed_bench:
        note += (
            " SPEED-Bench's AL: acceptance length by its rule, tokens per target call of each question, then the mean "
            "over questions, then over categories; tau is a ratio of sums over questions."
        )
    return Table(f"by-task-t{temperature:g}", f"Speed-up and tau by task, {mode(temperature)}", columns, shown, note)
