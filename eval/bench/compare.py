"""`draftsmith eval compare RUN RUN`: two runs of the bench against each other, prompt by prompt, without decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, add_result, format_interval, print_table, print_text
from draftsmith.eval.bench.results import (
    BASELINE,
    FEWEST_ROUNDS,
    Floats,
    MeasuredResamples,
    Row,
    of_methods,
    read_rows,
    speedup,
    sums_by,
    tokens_per_s,
    totals_of,
)
from draftsmith.eval.bench.tables import mode
from draftsmith.eval.clock import ClockName
from draftsmith.eval.meta import MEASURE, RESULTS, read_results
from draftsmith.eval.settings import CompareConfig
from draftsmith.modules.pretrained.provenance import differences, flatten
from draftsmith.modules.pretrained.reading import check_shape
from draftsmith.modules.types import InputError

# Settings without which two runs did not do the same work.
SAME_SETTINGS = ("top_k", "top_p", "dtype", "max_new_tokens", "ignore_eos", "turns")
# Settings that change how fast the same work is done.
SAME_SPEED = ("device", "num_threads", "loader")
SEED = 0  # of the bootstrap
MARGIN = 0.01  # of A's tau that B may lose and is still not worse
# What is shown of B in a class; of all classes, the first of these that any has.
WORSE, NO_VERDICT, BETTER, NOT_WORSE = VERDICTS = ("worse", "no verdict", "better", "not worse")
TAU_COLUMNS = (
    Column("tau_a", "tau A", ".2f"),
    Column("tau_b", "tau B", ".2f"),
    Column("tau", "tau B-A", "+.3f"),
    Column("tau_ci", "95 % CI", below=True),
)
META = {
    "settings": {name: object for name in (*SAME_SETTINGS, *SAME_SPEED, "by")},
    "prompts": {"sha256": str},
    "clock": str,
    **{name: dict for name in ("target", "hardware", "versions", "models", "heads")},
}


@dataclass(frozen=True)
class Bench:
    """Finished run: meta of its results.json, and the rows of its prompts."""

    name: str
    meta: Mapping[str, Any]
    rows: Sequence[Row]

    @cached_property
    def methods(self) -> dict[float, dict[str, list[Row]]]:
        """Temperature -> method -> its rows, in the order of the run."""
        temperatures = dict.fromkeys(row["temperature"] for row in self.rows)
        return {temperature: of_methods(self.rows, temperature) for temperature in temperatures}


def run(config: CompareConfig) -> int:
    """Print the notes, and the tables and verdicts of each temperature.

    Returns 0 if B is better or not worse in every class, 1 if it is worse in any, 3 if neither is shown.

    Raises:
        InputError: no finished runs, or runs that did not do the same work.
    """
    first, second = (open_bench(path) for path in config.runs)
    check_comparable(first, second)
    about = f"A: {first.name}. B: {second.name}. Ratios are B / A, differences B - A."
    for line in (about, *notes_of(first, second)):
        print_text(line)
    verdicts = list[str]()
    for table in compare_runs(first, second):
        print_table(table)
        for row in table.rows:
            if row["method"] != BASELINE and row.get("gain_low") is not None:  # no gains stand in the table of classes
                print_text(verdict(row))
        classes = [row for row in table.rows if "verdict" in row]
        for label, rows in itertools.groupby(classes, lambda row: row["method"]):
            print_text(summary(label, rows))
        verdicts += [row["verdict"] for row in classes]
    found = min(verdicts, key=VERDICTS.index, default=NO_VERDICT)
    add_result(verdict=found)
    return {WORSE: 1, NO_VERDICT: 3}.get(found, 0)


def verdict(row: Mapping[str, Any]) -> str:
    """Say which of two runs is faster with a method, if the interval tells."""
    low, high = row["gain_low"], row["gain_high"]
    said = "B is faster than A" if low > 1 else "A is faster than B" if high < 1 else "no difference is shown"
    return f"{row['method']}: {said}, B / A is {row['gain']:.2f}x and lies between {low:.2f} and {high:.2f}"


def open_bench(path: str) -> Bench:
    """Open a finished run.

    Raises:
        InputError: no finished run of the bench.
    """
    directory = Path(path)
    meta = read_results(directory, {"meta": dict})["meta"]
    if meta.get("kind") != "bench":
        found = f"results of kind {meta.get('kind', 'unknown')}"
        raise InputError(path, found, "a run of `draftsmith eval bench`", "Measure it (again).")
    check_shape(directory / RESULTS, meta, META, MEASURE, "meta")
    return Bench(path, meta, read_rows(directory))


def check_comparable(first: Bench, second: Bench) -> None:
    """Raise one InputError that lists everything that makes the runs incomparable."""
    shared = []
    for meta in (first.meta, second.meta):
        settings = {name: meta["settings"][name] for name in SAME_SETTINGS}
        shared.append(flatten({"target": meta["target"], **settings, "prompts": {"sha256": meta["prompts"]["sha256"]}}))
    differing = differences(*shared)
    if not set(first.methods) & set(second.methods):
        ours, theirs = (", ".join(f"{each:g}" for each in bench.methods) for bench in (first, second))
        differing.append(("temperatures", ours, theirs))
    if differing:
        expected = "runs of the same target, tokenizer, sampling, dtype and prompts"
        raise InputError("runs", list_differences(differing), expected, "Measure both with the same settings.")


def machine(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two runs must share for their tokens per second to be comparable."""
    hardware = {name: meta["hardware"].get(name) for name in ("cpu", "gpu", "cpu_count")}
    settings = {name: meta["settings"][name] for name in SAME_SPEED}
    return flatten({"hardware": hardware, "versions": meta["versions"], "clock": meta["clock"], **settings})


def list_differences(differing: Sequence[tuple[str, Any, Any]]) -> str:
    return "; ".join(f"{key} {a} and {b}" for key, a, b in differing)


def notes_of(first: Bench, second: Bench) -> list[str]:
    """Return what a reader must know before the tables."""
    # Differences of machine and drafters do not make the runs incomparable, but change what the numbers mean.
    notes, metas = [], (first.meta, second.meta)
    if slower := differences(*(machine(meta) for meta in metas)):
        notes.append(
            f"Taken on different machines, versions or threads ({list_differences(slower)}): tokens/s are left out."
        )
    drafters = (flatten({name: meta[name] for name in ("models", "heads")}) for meta in metas)
    if differing := differences(*drafters):
        notes.append(f"They draft with different models or heads ({list_differences(differing)}).")

    failed = [sum(row["error"] is not None for row in bench.rows) for bench in (first, second)]
    if any(failed):
        notes.append(f"Prompts that failed in either run are left out (rows: {failed[0]} and {failed[1]}).")
    return notes


def compare_runs(first: Bench, second: Bench) -> list[Table]:
    """Build two tables for each temperature that both runs have: of methods, and of classes of prompts and rounds."""
    same_machine = machine(first.meta) == machine(second.meta)
    clock: ClockName = first.meta["clock"]
    tables = []
    for temperature in (each for each in first.methods if each in second.methods):
        ours, theirs = first.methods[temperature], second.methods[temperature]
        # Later turns follow a run's own answers, which may differ.
        asked = [{(row["prompt"], row["turn"]): row["prompt_ids"] for row in own[BASELINE]} for own in (ours, theirs)]
        other = {key for key in asked[0].keys() & asked[1].keys() if asked[0][key] != asked[1][key]}
        base = pair(ours[BASELINE], theirs[BASELINE], other)
        rows = [
            {"method": label, **compare_method(pair(ours[a], theirs[b], other), base, clock, same_machine)}
            for label, a, b in matched(ours, theirs)
        ]
        speed = [Column("speed", "tokens/s B/A", ".3fx"), Column("speed_ci", "95 % CI", below=True)]
        columns = [
            Column("method", "method"),
            *(speed if same_machine else ()),
            Column("gain_a", "speed-up A", ".2fx"),
            Column("gain_b", "speed-up B", ".2fx"),
            Column("gain", "speed-up B/A", ".3fx"),
            Column("gain_ci", "95 % CI", below=True),
            *TAU_COLUMNS,
            Column("equal", "equal answers"),
        ]
        note = (
            f"{len(base[0])} prompts (each turn counts) that both runs measured, "
            f"{'CPU' if clock == 'cpu' else 'wall'} time; speed-up over each run's own ar; 95 % bootstrap intervals "
            "over prompts, paired."
        )
        if other:
            note += f" Turns left out, as they follow another answer in A than in B: {len(other)}."
        tables.append(Table(f"compare-t{temperature:g}", f"B against A, {mode(temperature)}", columns, rows, note))
        classes = [
            {"method": label, **row}
            for label, a, b in matched(ours, theirs)
            if a != BASELINE
            for row in compare_classes(pair(ours[a], theirs[b], other), divisions(first.meta, second.meta))
        ]
        columns = [Column("class", "class"), Column("method", "method"), *TAU_COLUMNS, Column("verdict", "verdict")]
        about = f"Intervals hold for all classes at once. Classes of fewer than {FEWEST_ROUNDS} rounds are left out."
        note = f"not worse: at least {1 - MARGIN:g} of A. {about}"
        tables.append(Table(f"compare-classes-t{temperature:g}", f"tau, {mode(temperature)}", columns, classes, note))
    return [table for table in tables if table.rows]


def divisions(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return what both runs divided their numbers by."""
    ours, theirs = (str(meta["settings"]["by"]).split(",") for meta in (first, second))
    return [name.strip() for name in ours if name.strip() in map(str.strip, theirs)]


def compare_classes(pairs: tuple[list[Row], list[Row]], names: Sequence[str]) -> list[Row]:
    """Compare tau of one method on all prompts and in each class of the divisions in which both runs have several, with
    intervals that hold for all of these at once."""
    resamples = MeasuredResamples(pairs[0], SEED)
    rows, taus, weights = list[Row](), list[Floats](), list[Floats]()
    for name in ("", *names):  # without a name, one class of all
        ours, theirs = (sums_by(own, name) for own in pairs)
        fewest = {part: np.minimum(ours[part][1], theirs[part][1]) for part in ours if part in theirs}
        parts = [part for part, calls in fewest.items() if not name or calls.sum() >= FEWEST_ROUNDS]
        for part in parts if len(parts) > 1 or not name else ():
            tau_a, tau_b = (float(tokens.sum() / calls.sum()) for tokens, calls in (ours[part], theirs[part]))
            title = f"{name}={part}" if name else "all prompts"
            rows.append({"class": title, "tau_a": tau_a, "tau_b": tau_b, "tau": tau_b - tau_a})
            drawn = [resamples.sums(own[part][0]) / resamples.sums(own[part][1]).clip(min=1) for own in (ours, theirs)]
            taus.append(drawn[1] - drawn[0])
            weights.append(fewest[part])
    intervals = resamples.simultaneous([row["tau"] for row in rows], taus, weights)
    for row, interval in zip(rows, intervals, strict=True):
        low, high = interval or (-math.inf, math.inf)
        shown = NOT_WORSE if low >= -MARGIN * row["tau_a"] else WORSE if high < 0 else NO_VERDICT
        row |= {"tau_ci": format_interval(interval, between=" to "), "verdict": BETTER if low > 0 else shown}
    return rows


def summary(label: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Say in which classes B is better, worse and neither, and which the intervals leave open."""
    said: dict[str, list[str]] = {verdict: [] for verdict in (BETTER, WORSE, NOT_WORSE, NO_VERDICT)}
    for row in rows:
        numbers = f" ({row['tau']:+.2f}, {row['tau_ci']})" if row["verdict"] in (BETTER, WORSE) else ""
        said[row["verdict"]].append(row["class"] + numbers)
    parts = (f"{verdict} on {', '.join(names)}" for verdict, names in said.items() if names)
    return f"{label}, tau of B: {'; '.join(parts)}"


def matched(ours: Collection[str], theirs: Collection[str]) -> list[tuple[str, str, str]]:
    """Return a label and both methods of each pair to compare: those of one name, or the only one of each run."""
    pairs = [(label, label, label) for label in ours if label in theirs]
    a, b = ([label for label in run if label != BASELINE] for run in (ours, theirs))
    if len(a) == len(b) == 1 and a != b:
        pairs.append((f"{a[0]} (A), {b[0]} (B)", a[0], b[0]))
    return pairs


def pair(ours: Sequence[Row], theirs: Sequence[Row], other: set[tuple[int, int]]) -> tuple[list[Row], list[Row]]:
    """Return the rows of prompts that both runs measured, in one order. other: prompts that differ between them."""
    first, second = ({(row["prompt"], row["turn"]): row for row in rows} for rows in (ours, theirs))
    # A prompt that failed in either run is in neither list.
    common = [key for key in first if key in second and key not in other]
    if not common:
        remedy = "Measure both again, or look at their failures."
        raise InputError("runs", "no prompt that both measured", "at least one", remedy)
    return [first[key] for key in common], [second[key] for key in common]


def compare_method(
    pairs: tuple[list[Row], list[Row]],
    base: tuple[list[Row], list[Row]],
    clock: ClockName,
    same_machine: bool,
) -> Row:
    """Compare one method, B over A. The bootstrap draws the same prompts for both runs and for their baselines."""
    first, second = pairs
    resamples = MeasuredResamples(first, SEED)
    equal = sum(a["token_ids"] == b["token_ids"] for a, b in zip(first, second, strict=True))
    row: Row = {"equal": f"{equal} of {len(first)}"}

    def add(name: str, value: float, interval: list[float] | None) -> None:
        low, high = interval or (None, None)
        shown = format_interval(interval, between=" to ")
        row.update({name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_ci": shown})

    def speeds(rows: Sequence[Row]) -> Any:
        return resamples.tokens_per_s(rows, clock)

    if same_machine:
        faster = tokens_per_s(second, clock) / tokens_per_s(first, clock)
        add("speed", faster, resamples.interval(speeds(second) / speeds(first)))
    row["gain_a"], row["gain_b"] = (speedup(pairs[run], base[run], clock) for run in (0, 1))
    gains = resamples.interval(speeds(second) / speeds(base[1]) / (speeds(first) / speeds(base[0])))
    add("gain", row["gain_b"] / row["gain_a"], gains)
    row["tau_a"], row["tau_b"] = (totals_of(own).tau for own in pairs)
    taus = resamples.interval(resamples.tau(second) - resamples.tau(first))
    add("tau", row["tau_b"] - row["tau_a"], taus)
    return row
