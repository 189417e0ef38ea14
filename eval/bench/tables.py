"""Tables of a bench: its methods, its tasks, and where drafts are accepted; as the command and the report show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.data.text.answers import Repetition
from draftsmith.eval.bench.kinds import KINDS
from draftsmith.eval.bench.results import BASELINE, shown_classes

Row = Mapping[str, Any]
SHOWN_PLACES = 8
# Classes of rounds and what their table is named by.
CLASS_TITLES = {"by_context": "tokens before the round", "by_turn": "turn", "by_kind": "kind of token"}
METHOD_COLUMNS = (
    Column("method", "method"),
    Column("tokens_per_s", "tokens/s", ",.1f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI", below=True),
    Column("tau", "tau", ".2f"),
    Column("tau_ci", "95 % CI", below=True),
    Column("accepted", "accepted", ".0%"),
    Column("equal", "= ar"),
)
POOLED, MACRO = "all, pooled", "mean of tasks"


def results_tables(results: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a run: methods at each temperature; by task, where there are several; where drafts hold."""
    rows = results["methods"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    methods, tasks, drafts = list[Table](), list[Table](), list[Table]()
    for temperature in temperatures:
        shown = [row for row in rows if row["temperature"] == temperature]
        methods.append(methods_table(shown, caption(results) if temperature == temperatures[-1] else ""))
        tasks += task_table(shown)
        drafts += acceptance_tables(shown, f"-t{temperature:g}", mode(temperature))
    return [*methods, *tasks, *drafts]


def methods_table(rows: Sequence[Row], note: str) -> Table:
    """Build the table of all methods at one temperature over all prompts."""
    # ar is always there.
    fastest = max(row["speedup"] for row in rows)
    cells = []
    for row in rows:
        # None where equality with ar is no fair test: sampling, or half precision.
        matches = row["matches_ar"]
        cells.append({
            **row,
            "speedup_ci": format_interval(row["speedup_ci95"]),
            "tau_ci": format_interval(row["tau_ci95"]),
            "accepted": row["acceptance_rate"],
            "equal": "-" if matches is None else "yes" if matches else f"no ({row['num_differing']})",
            "fastest": row["speedup"] == fastest,
        })  # fmt: skip
    temperature = rows[0]["temperature"]
    return Table(f"methods-t{temperature:g}", mode(temperature).capitalize(), METHOD_COLUMNS, cells, note)


def mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def caption(results: Mapping[str, Any]) -> str:
    """Say how the numbers were measured, and what is missing."""
    meta, first, settings = results["meta"], results["methods"][0], results["meta"]["settings"]
    modes = " and ".join(dict.fromkeys(mode(row["temperature"]) for row in results["methods"]))
    clock = "CPU time" if meta["clock"] == "cpu" else "wall time"
    repeats = "once" if settings["repeats"] == 1 else f"medians of {settings['repeats']}"
    # Text that copies is easier to draft.
    repeats_text = Repetition(first["copied_prompt"], first["copied_answer"]).text()
    if first["distinct_4grams"] is not None:
        repeats_text += f"; distinct 4-grams {first['distinct_4grams']:.2f}"
    text = (
        f"{first['prompts']} prompts, {first['tokens']:,} tokens ({repeats_text}), {modes}, "
        f"{settings['dtype']} on {settings['device']}, {settings['num_threads']} thread(s), "
        f"{clock}, interleaved, {repeats}; speed-up over this engine's own ar."
    )
    if meta["step_costs"]:
        text += f" c by {', '.join(f'{name}: {c:.3g}' for name, c in meta['step_costs'].items())}."
    if results["failures"]:
        text += f" Prompts that failed and were left out: {len(results['failures'])}."
    return text


def replay_tables(rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Table]:
    """Build the tables of replayed answers: methods, then acceptance lengths by drafted tokens and task."""
    first, about, settings = rows[0], meta["answers"], meta["settings"]
    note = (
        f"Replayed: {first['prompts']} recorded answers, {first['tokens']:,} tokens, {settings['dtype']} on "
        f"{settings['device']}; nothing was decoded, and nothing timed. tau is decoding's, in the mean over its random "
        "numbers; 95 % bootstrap intervals over texts. "
    )
    if first["temperature"]:
        note += f"Surprise of the answers: {about['entropy'] + about['excess']:.3f} nats a token; of the target's own: "
        note += f"{about['entropy']:.3f}."
    else:
        note += f"Tokens that are not the target's first choice here: {about['foreign']:.2%}."
    shown, at = mode(first["temperature"]), f"-t{first['temperature']:g}"
    columns = [column for column in METHOD_COLUMNS if column.key in ("method", "tau", "tau_ci", "accepted")]
    cells = [{**row, "tau_ci": format_interval(row["tau_ci95"]), "accepted": row["acceptance_rate"]} for row in rows]
    tables = [Table(f"methods{at}", shown.capitalize(), columns, cells, note)]
    lengths = [{part["name"]: part for part in row["by_length"]} for row in rows]
    order = [str(length) for length in range(1, max(map(len, lengths)) + 1)]
    of_texts = {"note": "", "over": "texts"}
    if len(order) > 1:
        title = f"Acceptance length by drafted tokens, {shown}"
        tables.append(classes_table(rows, lengths, order, f"by_length{at}", title, **of_texts))
    if len(tasks := list(first.get("by_task", ()))) > 1:
        parts = [row["by_task"] for row in rows]
        title = f"Acceptance length by task, {shown}"
        tables.append(classes_table(rows, parts, tasks, f"by_task{at}", title, **of_texts))
    return tables + acceptance_tables(rows, at, shown)


def task_table(rows: Sequence[Row]) -> list[Table]:
    """Build the table of speed-up and tau by task and over tasks, as table 1 of EAGLE-2, if there are several.

    Columns are what there is less of, methods or tasks, so that the table fits.
    """
    baseline, others = rows[0], [row for row in rows if row["method"] != BASELINE]
    if not others or len(baseline.get("by_task", ())) < 2:
        return []
    numbers: dict[str, dict[str, Row]] = {}
    for row in others:
        macro = {"speedup": row["macro_speedup"], "tau": row["macro_tau"]}
        parts = {task.replace("_", " "): part for task, part in row["by_task"].items()} | {POOLED: row, MACRO: macro}
        for task, part in parts.items():
            numbers.setdefault(task, {})[row["method"]] = part
    first = "task"
    if len(numbers) < len(others):
        names = [row["method"] for row in others]
        numbers = {name: {task: parts[name] for task, parts in numbers.items()} for name in names}
        first = "method"
    columns = [Column("of", first)]
    for group in next(iter(numbers.values())):
        columns.append(Column(f"{group}.speedup", group, ".2fx"))
        columns.append(Column(f"{group}.tau", f"{group}: tau", ".2f", below=True))
    cells = [
        {"of": name, **{f"{group}.{key}": part[key] for group, part in parts.items() for key in ("speedup", "tau")}}
        for name, parts in numbers.items()
    ]
    counts = ", ".join(f"{task} {part['prompts']}" for task, part in baseline["by_task"].items())
    note = (
        f"{POOLED}: ratio of sums over the prompts of all tasks. {MACRO}: mean over tasks, each counting alike. "
        f"Prompts of the tasks: {counts}."
    )
    temperature = baseline["temperature"]
    return [Table(f"tasks-t{temperature:g}", f"Speed-up and tau by task, {mode(temperature)}", columns, cells, note)]


def acceptance_tables(rows: Sequence[Row], about: str, mode: str) -> list[Table]:
    """Return the tables of the methods at one temperature: by place, and by context, turn and kind where they vary.

    about, mode: ends of the tables' names and titles.
    """
    rows = [row for row in rows if row.get("accepted_by_place")]
    if not rows:
        return []
    note = "Of the drafts of n tokens or more, the share whose first n were accepted (acceptance rate per position)."
    tables = [places_table(rows, f"places{about}", f"Accepted by place in the draft, {mode}", note)]
    for key, title in CLASS_TITLES.items():
        parts = [{part["name"]: part for part in shown_classes(row, key)} for row in rows]
        begins = {name: part.get("from", 0) for own in parts for name, part in own.items()}
        order = sorted(begins, key=lambda name: (begins[name], KINDS.index(name) if name in KINDS else 0))
        if len(order) > 1:
            title = f"Acceptance length by {title}, {mode}"
            tables.append(classes_table(rows, parts, order, f"{key}{about}", title))
    return tables


def places_table(rows: Sequence[Row], name: str, title: str, note: str, first: str = "method") -> Table:
    """Build the table of acceptance by place. first: key and heading of what drafted."""
    places = min(SHOWN_PLACES, max(len(row["accepted_by_place"]) for row in rows))
    columns = [Column(first, first), *(Column(str(n), str(n), ".2f") for n in range(1, places + 1))]
    cells = [
        {first: row[first], **{str(n): share for n, share in enumerate(row["accepted_by_place"], 1)}} for row in rows
    ]
    return Table(name, title, columns, cells, note)


def classes_table(
    rows: Sequence[Row],
    parts: Sequence[Mapping[str, Row]],
    classes: Sequence[str],
    name: str,
    title: str,
    note: str = "Of rounds, without the prefill.",
    over: str = "prompts",
) -> Table:
    """Return a table of acceptance lengths. parts: classes of rounds of each method, by their names."""
    # Classes of few prompts have no intervals.
    if any(part["tau_ci95"] for own in parts for part in own.values()):
        note = f"{note} 95 % bootstrap intervals over {over}.".lstrip()
    by_kind = name.startswith("by_kind")
    columns = [Column("method", "method")]
    for heading in classes:
        columns += [Column(heading, heading, ".2f"), Column(f"{heading}_ci", "", below=True)]
        columns += [Column(f"{heading}_accepted", "", ".0%", below=True)] if by_kind else []
    cells = []
    for row, own in zip(rows, parts, strict=True):
        line = {"method": row["method"]}
        for heading, part in own.items():
            line |= {heading: part["tau"], f"{heading}_ci": format_interval(part["tau_ci95"])}
            line[f"{heading}_accepted"] = part.get("acceptance_rate")
        cells.append(line)
    if by_kind:
        note += " Then the accepted share of the drafted tokens. A round counts by its first token."
    return Table(name, title, columns, cells, note)
