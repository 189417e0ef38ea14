"""results.json as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table, format_interval, print_table
from draftsmith.data.text.repetition import Repetition
from draftsmith.modules.drafters.methods import LOSSY

METHOD_COLUMNS = (
    Column("method", "method"),
    Column("tokens_per_s", "tokens/s", ",.1f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI", below=True),
    Column("tau", "tau", ".2f"),
    Column("tau_ci", "95 % CI", below=True),
    Column("discarded", "discarded", ".0%"),
    Column("equal", "= ar"),
)
COPYING_COLUMNS = (
    Column("method", "method"),
    Column("tau", "tau", ".2f"),
    Column("tau_copying", "copying", ".2f"),
    Column("tau_new", "other text", ".2f"),
)
COPYING_NOTE = (
    "copying: tau of the rounds whose first token continues a repetition (it and the three before it have stood in "
    "prompt or answer before). other text: of all other rounds. Both without prefills."
)
POOLED, MACRO = "all, pooled", "mean of tasks"
SPEED_BENCH = "speed_bench_tau"  # key of a row
SHOWN_FAILURES = 5


def results_tables(results: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a run.

    At each temperature the methods; then their tau on text that copies and on other text; then, where prompts have
    several tasks, the methods by task.
    """
    temperatures = list(dict.fromkeys(row["temperature"] for row in results["methods"]))
    methods: list[Table] = []
    copying: list[Table] = []
    tasks: list[Table] = []
    for temperature in temperatures:
        rows = [row for row in results["methods"] if row["temperature"] == temperature]
        # ar is always there.
        fastest = max(row["speedup"] for row in rows if not row["method"].endswith(LOSSY))
        cells = []
        for row in rows:
            # None where equality with ar is no fair test: sampling, or half precision.
            matches = row["matches_ar"]
            cells.append({
                **row,
                "speedup_ci": format_interval(row["speedup_ci95"]),
                "tau_ci": format_interval(row["tau_ci95"]),
                "discarded": row["discard_rate"] if row["num_draft_tokens"] else None,
                "equal": "-" if matches is None else "yes" if matches else f"no ({row['num_differing']})",
                "fastest": row["speedup"] == fastest,
            })  # fmt: skip
        note = caption(results) if temperature == temperatures[-1] else ""
        methods.append(Table("methods", mode(temperature).capitalize(), METHOD_COLUMNS, cells, note))
        if drafting := [row for row in rows if row["num_draft_tokens"]]:
            title = f"Tau where the text copies, {mode(temperature)}"
            copying.append(Table(f"copying-t{temperature:g}", title, COPYING_COLUMNS, drafting, COPYING_NOTE))
        if len(rows) > 1 and (len(rows[0].get("by_task", ())) > 1 or SPEED_BENCH in rows[0]):
            tasks.append(by_task(rows, temperature))
    return [*methods, *copying, *tasks]


def show_results(table: Table) -> None:
    """Print one of `results_tables`."""
    print_table(table, bold="fastest")


def mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def caption(results: Mapping[str, Any]) -> str:
    """Say how the numbers were measured, and what is missing."""
    meta, first, settings = results["meta"], results["methods"][0], results["meta"]["settings"]
    modes = " and ".join(dict.fromkeys(mode(row["temperature"]) for row in results["methods"]))
    clock = "CPU time" if meta["clock"] == "cpu" else "wall time"
    together = f"{settings['batch_size']} prompts at a time, " if settings["batch_size"] > 1 else ""
    repeats = "once" if settings["repeats"] == 1 else f"medians of {settings['repeats']}"
    precisions = [settings["dtype"]]
    for part in ("target", "draft"):
        if settings[f"{part}_precision"] != "dtype":
            precisions.append(f"{part} in {settings[f'{part}_precision']}")
    text = (
        f"{first['prompts']} prompts, {first['tokens']:,} tokens{repetition_of(first)}, {modes}, "
        f"{', '.join(precisions)} on {settings['device']}, {settings['num_threads']} thread(s), "
        f"{together}{clock}, interleaved, {repeats}; speed-up over this engine's own ar."
    )
    if meta["step_costs"]:
        text += f" c by {', '.join(f'{name}: {c:.3g}' for name, c in meta['step_costs'].items())}."
    text += fidelity_of(meta)
    if any(row["method"].endswith(LOSSY) for row in results["methods"]):
        text += f" A method that is{LOSSY} answers with another distribution than the target's."
    failures = list(dict.fromkeys(f"{failure['task']} {failure['id']}".strip() for failure in results["failures"]))
    if failures:
        more = ", ..." if len(failures) > SHOWN_FAILURES else ""
        text += f" Left out because they failed ({len(failures)}): {', '.join(failures[:SHOWN_FAILURES])}{more}."
    return text


def fidelity_of(meta: Mapping[str, Any]) -> str:
    """Say how far a target in fewer bits is from the same target without; empty if it was not in fewer."""
    fidelity = meta.get("target_fidelity")
    if not fidelity:
        return ""
    bits, dtype = meta["settings"]["target_precision"], meta["settings"]["dtype"]
    return (
        f" The target is the one in {bits}, and = ar, and lossless, hold for it: its distributions against those of "
        f"{dtype} over {fidelity['tokens']:,} tokens of the prompts: KL {fidelity['kl']:.2g} nats, total variation "
        f"{fidelity['total_variation']:.2g}, the same first choice {fidelity['same_choice']:.1%}."
    )


def repetition_of(row: Mapping[str, Any]) -> str:
    """Say in brackets how much of a row's text repeats."""
    parts = [Repetition(row["copied_prompt"], row["copied_answer"]).text()]
    if row["distinct_4grams"] is not None:
        parts.append(f"distinct 4-grams {row['distinct_4grams']:.2f}")
    return f" ({'; '.join(parts)})"


def by_task(rows: Sequence[Mapping[str, Any]], temperature: float) -> Table:
    """Build the table of speed-up and tau by task and over tasks, as table 1 of EAGLE-2. rows: the first is ar."""
    baseline, *others = rows
    tasks, speed_bench = baseline["by_task"], SPEED_BENCH in baseline
    titles = {**{task: task.replace("_", " ") for task in tasks}, "pooled": POOLED, "macro": MACRO}
    columns = [Column("method", "method")]
    for key, title in titles.items():
        columns += [Column(f"{key}.speedup", title, ".2fx"), Column(f"{key}.tau", f"{title}: tau", ".2f", below=True)]
        if speed_bench and key != "pooled":
            columns.append(Column(f"{key}.{SPEED_BENCH}", f"{title}: SPEED-Bench's AL", ".2f", below=True))
    cells = []
    for row in others:
        macro = {"speedup": row["macro_speedup"], "tau": row["macro_tau"], SPEED_BENCH: row.get(SPEED_BENCH)}
        parts = {**row["by_task"], "pooled": row, "macro": macro}
        numbers = {
            f"{key}.{name}": part.get(name) for key, part in parts.items() for name in ("speedup", "tau", SPEED_BENCH)
        }
        cells.append({"method": row["method"], **numbers})
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
    return Table(f"by-task-t{temperature:g}", f"Speed-up and tau by task, {mode(temperature)}", columns, cells, note)
