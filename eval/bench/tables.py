"""Tables of a bench: its methods, its tasks, and where drafts are accepted; as the command and the report show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.data.text.answers import Repetition
from draftsmith.data.text.kinds import KINDS
from draftsmith.eval.bench.results import BASELINE, shown_classes
from draftsmith.eval.bench.slices import slices_table

Row = Mapping[str, Any]
SHOWN_PLACES = 8
PLACES_NOTE = "Of the drafts of n tokens or more, the share whose first n were accepted."
# What divisions are called in titles, where their names say too little.
TITLES = {"context": "tokens before the round", "kind": "kind of token", "draft_length": "drafted tokens"}
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
MACRO = "mean of tasks"


def results_tables(results: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a run: methods at each temperature, what is accepted by place, and a table for each `by`."""
    rows = results["methods"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    methods, parts = list[Table](), list[Table]()
    for temperature in temperatures:
        shown = [row for row in rows if row["temperature"] == temperature]
        methods.append(methods_table(shown, caption(results) if temperature == temperatures[-1] else ""))
        parts += part_tables([row for row in shown if row["method"] != BASELINE], temperature)
    return [*methods, *parts]


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
    """Build the tables of replayed answers: methods, what is accepted by place, and a table for each `by`."""
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
    columns = [column for column in METHOD_COLUMNS if column.key in ("method", "tau", "tau_ci", "accepted")]
    cells = [{**row, "tau_ci": format_interval(row["tau_ci95"]), "accepted": row["acceptance_rate"]} for row in rows]
    temperature = first["temperature"]
    whole = Table(f"methods-t{temperature:g}", mode(temperature).capitalize(), columns, cells, note)
    slices = [slices_table(row) for row in rows if row["slices"]]
    return [whole, *part_tables(rows, temperature), *slices]


def part_tables(rows: Sequence[Row], temperature: float) -> list[Table]:
    """Return the tables of the methods at one temperature: accepted by place, then one for each division with several
    classes."""
    about, said = f"-t{temperature:g}", mode(temperature)
    drafting = [row for row in rows if row.get("accepted_by_place")]
    tables = [places_table(drafting, f"places{about}", f"Accepted by place, {said}")] if drafting else []
    for name in dict.fromkeys(name for row in rows for name in row.get("by") or ()):
        parts = {row["method"]: {part["name"]: part for part in shown_classes(row, name)} for row in rows}
        begins = {key: part.get("from", 0) for own in parts.values() for key, part in own.items()}
        classes = sorted(begins, key=lambda key: (begins[key], KINDS.index(key) if name == "kind" else 0))
        if len(classes) > 1:
            tables.append(division_table(name, parts, classes, rows, f"by_{name}{about}", said))
    return tables


def places_table(rows: Sequence[Row], name: str, title: str, note: str = PLACES_NOTE, first: str = "method") -> Table:
    """Build the table of acceptance by place. first: key and heading of what drafted."""
    places = min(SHOWN_PLACES, max(len(row["accepted_by_place"]) for row in rows))
    columns = [Column(first, first), *(Column(str(n), str(n), ".2f") for n in range(1, places + 1))]
    cells = [
        {first: row[first], **{str(n): share for n, share in enumerate(row["accepted_by_place"], 1)}} for row in rows
    ]
    return Table(name, title, columns, cells, note)


def division_table(
    by: str,
    parts: Mapping[str, Mapping[str, Row]],
    classes: Sequence[str],
    rows: Sequence[Row],
    name: str,
    mode: str,
) -> Table:
    """Build the table of one division: tau of its classes with their intervals, behind the speed-up where they have
    one. Columns are what there is less of, methods or classes, so that it fits.

    parts: method -> class -> its numbers. classes: in their order.
    """
    timed = any("speedup" in part for own in parts.values() for part in own.values())
    of_rounds = any("rounds" in part for own in parts.values() for part in own.values())
    notes = ["Of rounds, without the prefill."] if of_rounds else []
    if by == "kind":
        notes.append("A round counts by its first token.")
    if by == "task" and timed:
        # As table 1 of EAGLE-2.
        counts = ", ".join(f"{key} {parts[rows[0]['method']][key]['prompts']}" for key in classes)
        notes.append(f"{MACRO}: each task counts alike. Prompts of the tasks: {counts}.")
        macro = {row["method"]: {"speedup": row["macro_speedup"], "tau": row["macro_tau"]} for row in rows}
        parts = {method: {**own, MACRO: macro[method]} for method, own in parts.items()}
        classes = [*classes, MACRO]
    if any(part.get("tau_ci95") for own in parts.values() for part in own.values()) and not timed:
        notes.append("95 % bootstrap intervals.")
    across = len(classes) > len(parts)
    lines, headings = (classes, list(parts)) if across else (list(parts), classes)
    first = by if across else "method"
    columns, cells = [Column("of", first)], list[dict[str, Any]]()
    for heading in headings:
        columns += [Column(f"{heading}.speedup", heading, ".2fx")] if timed else []
        columns += [Column(f"{heading}.tau", f"{heading}: tau" if timed else heading, ".2f", below=timed)]
        columns += [] if timed else [Column(f"{heading}.ci", "", below=True)]
    for line in lines:
        cell: dict[str, Any] = {"of": line}
        for heading in headings:
            method, own = (heading, line) if across else (line, heading)
            if (part := parts[method].get(own)) is not None:
                cell |= {f"{heading}.{key}": part.get(key) for key in ("speedup", "tau")}
                cell[f"{heading}.ci"] = format_interval(part.get("tau_ci95"))
        cells.append(cell)
    title = f"{'Speed-up and tau' if timed else 'Tau'} by {TITLES.get(by, by)}, {mode}"
    return Table(name, title, columns, cells, " ".join(notes))
