"""`draftsmith eval compare RUN RUN`: two runs of the bench against each other, prompt by prompt, without decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.data.console import Column, Table, format_interval, log_note, print_table, print_text
from draftsmith.data.store.files import make_directory, write_text
from draftsmith.data.store.manifest import differences, flatten, without_unrecorded
from draftsmith.data.store.reading import check_shape, read_object
from draftsmith.eval.bench.results import BASELINE, RESULTS, Row, of_methods, read_rows, totals_of
from draftsmith.eval.bench.summary import MeasuredResamples, speedup, tokens_per_s
from draftsmith.eval.bench.tables import mode
from draftsmith.eval.bootstrap import Floats
from draftsmith.eval.clock import ClockName
from draftsmith.eval.report.tables import markdown
from draftsmith.modules.types import InputError

# Settings without which two runs did not do the same work.
SAME_SETTINGS = ("top_k", "top_p", "dtype", "max_new_tokens", "ignore_eos", "turns", "batch_size")
# Settings that change how fast the same work is done: tokens per second are then of different machines.
SAME_SPEED = ("device", "num_threads", "engine", "packed")
AGAIN = "Measure it again."
META = {
    "settings": {name: object for name in (*SAME_SETTINGS, *SAME_SPEED)},
    "prompts": {"sha256": str},
    "clock": str,
    **{name: dict for name in ("target", "hardware", "versions", "models", "heads")},
}
SHA256_DIGITS = 64
BOTH = tuple[list[Row], list[Row]]


@dataclass(frozen=True)
class CompareConfig:
    """Compares two runs of `draftsmith eval bench` over the prompts that both measured, with paired intervals.

    Runs of another target, tokenizer, dtype, of other sampling settings or prompts are refused: their numbers are not
    of the same thing.

    Attributes:
        runs: directories of the two runs; ratios and differences are those of the second over the first.
        output: Markdown file that receives the tables too.
        seed: of the bootstrap.
    """

    runs: list[str]
    output: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.runs) != 2:
            expected = "two directories of `draftsmith eval bench`"
            raise InputError("runs", f"{len(self.runs)} of them", expected, "Name two.")


@dataclass(frozen=True)
class Bench:
    """A finished run: meta of its results.json, and the rows of its prompts."""

    name: str
    meta: Mapping[str, Any]
    rows: Sequence[Row]

    @cached_property
    def methods(self) -> dict[float, dict[str, list[Row]]]:
        """Temperature -> method -> its rows, in the order of the run."""
        temperatures = dict.fromkeys(row["temperature"] for row in self.rows)
        return {temperature: of_methods(self.rows, temperature) for temperature in temperatures}


def run(config: CompareConfig) -> None:
    """Print, and write, the notes and a table for each temperature."""
    first, second = (open_bench(path) for path in config.runs)
    check_comparable(first, second)
    notes = [f"A: {first.name}. B: {second.name}. Ratios are B / A, differences B - A.", *notes_of(first, second)]
    tables = compare_runs(first, second, config.seed)
    for line in notes:
        print_text(line)
    for table in tables:
        print_table(table)
    if config.output is not None:
        make_directory(config.output.parent)
        lines = [*(f"- {note}" for note in notes), "", *(markdown(table) for table in tables)]
        write_text(config.output, "\n".join(lines))
        log_note(f"Written to {config.output}")


def open_bench(path: str) -> Bench:
    """Raises:
    InputError: no finished run of the bench, or one of an earlier version.
    """
    directory = Path(path)
    if not (directory / RESULTS).exists():
        remedy = "Give the command of the run again: it goes on." if directory.is_dir() else "Check the path."
        raise InputError(path, f"no {RESULTS}", "a finished run of `draftsmith eval bench`", remedy)
    meta = read_object(directory / RESULTS, {"meta": dict}, AGAIN)["meta"]
    if meta.get("kind") != "bench":
        found = f"results of kind {meta.get('kind', 'unknown (of an earlier version)')}"
        raise InputError(path, found, "a run of `draftsmith eval bench`", "Measure it (again).")
    check_shape(directory / RESULTS, meta, META, AGAIN, "meta")
    return Bench(path, meta, read_rows(directory))


def check_comparable(first: Bench, second: Bench) -> None:
    """Raises:
    InputError: one error that lists all that makes the runs incomparable.
    """
    differing, _ = without_unrecorded(differences(identity(first.meta), identity(second.meta)))
    if not set(first.methods) & set(second.methods):
        ours, theirs = (", ".join(f"{each:g}" for each in bench.methods) for bench in (first, second))
        differing.append(("temperatures", ours, theirs))
    if differing:
        expected = "runs of the same target, tokenizer, sampling, dtype and prompts"
        raise InputError("runs", said(differing), expected, "Measure both with the same settings.")


def identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share."""
    settings = {name: meta["settings"][name] for name in SAME_SETTINGS}
    settings["target_precision"] = meta["settings"].get("target_precision", "dtype")  # earlier versions had no other
    return flatten({"target": meta["target"], **settings, "prompts": {"sha256": meta["prompts"]["sha256"]}})


def machine(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What makes tokens per second of two runs those of different machines."""
    hardware = {name: meta["hardware"].get(name) for name in ("cpu", "gpu", "cpu_count")}
    settings = {name: meta["settings"][name] for name in SAME_SPEED}
    settings["draft_precision"] = meta["settings"].get("draft_precision", "dtype")
    return flatten({"hardware": hardware, "versions": meta["versions"], "clock": meta["clock"], **settings})


def drafters(meta: Mapping[str, Any]) -> dict[str, Any]:
    return flatten({name: meta[name] for name in ("models", "heads")})


def said(differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Hashes by their first twelve digits."""

    def short(value: Any) -> Any:
        return value[:12] if isinstance(value, str) and len(value) == SHA256_DIGITS else value

    return "; ".join(f"{key} {short(a)} and {short(b)}" for key, a, b in differing)


def notes_of(first: Bench, second: Bench) -> list[str]:
    """What a reader must know before the tables."""
    notes, (mine, theirs) = [], (first.meta, second.meta)
    if slower := differences(machine(mine), machine(theirs)):
        notes.append(f"Taken on different machines, versions or threads ({said(slower)}): tokens/s are left out.")
    differing, unrecorded = without_unrecorded(differences(drafters(mine), drafters(theirs)))
    if differing:
        notes.append(f"They draft with different models or heads ({said(differing)}).")
    unrecorded += without_unrecorded(differences(identity(mine), identity(theirs)))[1]
    if unrecorded:
        notes.append(f"Not compared, for one of them does not record it: {', '.join(sorted(unrecorded))}.")
    notes += auto_notes(mine, theirs)
    for temperature in dict.fromkeys([*first.methods, *second.methods]):
        for letter, own, other in (("A", first, second), ("B", second, first)):
            alone = [
                label for label in own.methods.get(temperature, {}) if label not in other.methods.get(temperature, ())
            ]
            if alone:
                notes.append(f"Only in {letter}, {mode(temperature)}: {', '.join(alone)}.")
    failed = [sum(row["error"] is not None for row in bench.rows) for bench in (first, second)]
    if any(failed):
        notes.append(f"Prompts that failed in either run are left out (rows: {failed[0]} and {failed[1]}).")
    return notes


def auto_notes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What `auto` came to where both measured it, and not alike."""
    found = []
    for kind, name in (("step_costs", "c of {}"), ("tree_times", "times of {}")):
        mine, theirs = first.get(kind) or {}, second.get(kind) or {}  # earlier versions have none
        for key in (key for key in mine if key in theirs and mine[key] != theirs[key]):
            values = f" {mine[key]:.4g} and {theirs[key]:.4g}" if kind == "step_costs" else ""
            found.append(name.format(key) + values)
    why = "methods that go by them draft otherwise for that alone. --costs takes the numbers of another run."
    return [f"They measured other costs for auto ({'; '.join(found)}): {why}"] if found else []


def compare_runs(first: Bench, second: Bench, seed: int) -> list[Table]:
    """A table for each temperature that both have."""
    comparable = machine(first.meta) == machine(second.meta)
    clock: ClockName = first.meta["clock"]
    tables = []
    for temperature in (each for each in first.methods if each in second.methods):
        mine, theirs = first.methods[temperature], second.methods[temperature]
        base = paired(mine[BASELINE], theirs[BASELINE])
        rows = [
            {"method": label, **compared(paired(mine[label], theirs[label]), base, clock, seed, comparable)}
            for label in mine
            if label in theirs
        ]
        tables.append(table_of(rows, temperature, len(base[0]), comparable, clock))
    return tables


def paired(mine: Sequence[Row], theirs: Sequence[Row]) -> BOTH:
    """What both measured: the same prompts in the same order."""
    ours, others = ({(row["prompt"], row["turn"]): row for row in rows} for rows in (mine, theirs))
    common = [key for key in ours if key in others]
    if not common:
        remedy = "Measure both again, or look at their failures."
        raise InputError("runs", "no prompt that both measured", "at least one", remedy)
    return [ours[key] for key in common], [others[key] for key in common]


def compared(items: BOTH, base: BOTH, clock: ClockName, seed: int, comparable: bool) -> Row:
    """One method: B over A. The bootstrap draws the same prompts for both runs and for their baselines."""
    first, second = items
    drawn = MeasuredResamples(first, seed)

    def speeds(rows: Sequence[Row]) -> Floats:
        return drawn.tokens_per_s(rows, clock)

    found: Row = {}

    def add(name: str, value: float, ends: list[float] | None) -> None:
        low, high = ends or (None, None)
        found.update(
            {name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_ci": format_interval(ends, between=" to ")}
        )

    if comparable:
        faster = tokens_per_s(second, clock) / tokens_per_s(first, clock)
        add("speed", faster, drawn.interval(lambda: speeds(second) / speeds(first)))
    found["gain_a"], found["gain_b"] = (speedup(items[run], base[run], clock) for run in (0, 1))
    gains = drawn.interval(lambda: speeds(second) / speeds(base[1]) / (speeds(first) / speeds(base[0])))
    add("gain", found["gain_b"] / found["gain_a"], gains)
    found["tau_a"], found["tau_b"] = (totals_of(own).tau for own in items)
    add("tau", found["tau_b"] - found["tau_a"], drawn.interval(lambda: drawn.tau(second) - drawn.tau(first)))
    equal = sum(a["token_ids"] == b["token_ids"] for a, b in zip(first, second, strict=True))
    return {**found, "equal": f"{equal} of {len(first)}"}


def table_of(rows: Sequence[Row], temperature: float, prompts: int, comparable: bool, clock: ClockName) -> Table:
    speed = [Column("speed", "tokens/s B/A", ".3fx"), Column("speed_ci", "95 % CI", below=True)]
    columns = [
        Column("method", "method"),
        *(speed if comparable else ()),
        Column("gain_a", "speed-up A", ".2fx"),
        Column("gain_b", "speed-up B", ".2fx"),
        Column("gain", "speed-up B/A", ".3fx"),
        Column("gain_ci", "95 % CI", below=True),
        Column("tau_a", "tau A", ".2f"),
        Column("tau_b", "tau B", ".2f"),
        Column("tau", "tau B-A", "+.3f"),
        Column("tau_ci", "95 % CI", below=True),
        Column("equal", "equal answers"),
    ]
    note = (
        f"{prompts} prompts (each turn counts) that both runs measured, {'CPU' if clock == 'cpu' else 'wall'} time; "
        "speed-up over each run's own ar; 95 % bootstrap intervals over prompts, paired."
    )
    return Table(f"compare-t{temperature:g}", f"B against A, {mode(temperature)}", columns, rows, note)
