"""Acceptance of drafted tokens by their place in the draft, the length of the context and the turn.

A round's counts are those of `DecodeStep`. The prefill drafts nothing and is left out here, so that the acceptance
length of rounds is what servers report: 1 + accepted tokens by drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.eval.bootstrap import Resamples

Row = Mapping[str, Any]
PLACES = 16  # of a draft that are counted
SHOWN_PLACES = 8  # of them in a table
SHORTEST = 256  # tokens of the first class of context lengths; each later one is twice as long
FEWEST_ROUNDS = 30  # of a class in a table
FEWEST_PROMPTS = 5  # of a class with an interval


def rounds_of(row: Row) -> Iterator[tuple[int, Row]]:
    """Yield each round of an answer with the tokens of prompt and answer before it."""
    context = row["prompt_tokens"] + row["prefill_emitted"]
    for step in row["rounds"]:
        yield context, step
        context += step["num_emitted"]


def acceptance(rows: Sequence[Row], resamples: Resamples) -> dict[str, Any]:
    """Return what results.json holds of one method's drafts; empty for a method without any.

    accepted_by_place: of the rounds that drafted n tokens or more, the share in which n or more were accepted (servers'
    acceptance rate per position). by_context, by_turn: acceptance length of the rounds, with its interval.
    """
    drafted, accepted = [0] * PLACES, [0] * PLACES
    by_context: dict[int, list[tuple[int, int]]] = {}
    by_turn: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for context, step in rounds_of(row):
            for place in range(min(PLACES, step["num_drafted"])):
                drafted[place] += 1
                accepted[place] += step["num_accepted"] > place
            begin = 0 if context < SHORTEST else 1 << (context.bit_length() - 1)
            for classes, key in ((by_context, begin), (by_turn, row["turn"])):
                classes.setdefault(key, []).append((number, step["num_emitted"]))
    if not any(drafted):
        return {}

    def length(key: str, value: int, found: Sequence[tuple[int, int]]) -> dict[str, Any]:
        emitted, rounds = [0] * len(rows), [0] * len(rows)
        for number, count in found:
            emitted[number] += count
            rounds[number] += 1
        interval = None
        # Of fewer prompts, some resamples would hold none.
        if sum(count > 0 for count in rounds) >= FEWEST_PROMPTS:
            interval = resamples.interval(lambda: resamples.sums(emitted) / resamples.sums(rounds).clip(min=1))
        return {key: value, "rounds": len(found), "tau": sum(emitted) / len(found), "tau_ci95": interval}

    return {
        "accepted_by_place": [right / count for right, count in zip(accepted, drafted, strict=True) if count],
        "by_context": [length("from", begin, found) for begin, found in sorted(by_context.items())],
        "by_turn": [length("turn", turn, found) for turn, found in sorted(by_turn.items())],
    }


def acceptance_tables(rows: Sequence[Row], about: str, mode: str) -> list[Table]:
    """Return the tables of the methods at one temperature: by place, and by context and turn where they vary.

    about, mode: ends of the tables' names and titles.
    """
    rows = [row for row in rows if row.get("accepted_by_place")]
    if not rows:
        return []
    tables = [places_table(rows, f"places{about}", f"Accepted by place in the draft, {mode}")]
    for key, value, title in (("by_context", "from", "tokens before the round"), ("by_turn", "turn", "turn")):
        parts = [{part[value]: part for part in row[key] if part["rounds"] >= FEWEST_ROUNDS} for row in rows]
        if len(classes := sorted(set().union(*parts))) > 1:
            tables.append(lengths_table(rows, parts, classes, f"{key}{about}", f"Acceptance length by {title}, {mode}"))
    return tables


def places_table(rows: Sequence[Row], name: str, title: str) -> Table:
    places = min(SHOWN_PLACES, max(len(row["accepted_by_place"]) for row in rows))
    columns = [Column("method", "method"), *(Column(str(n), str(n), ".2f") for n in range(1, places + 1))]
    cells = []
    for row in rows:
        shares = {str(n): share for n, share in enumerate(row["accepted_by_place"], 1)}
        cells.append({"method": row["method"], **shares})
    note = "Of the drafts of n tokens or more, the share whose first n were accepted (acceptance rate per position)."
    return Table(name, title, columns, cells, note)


def lengths_table(
    rows: Sequence[Row], parts: Sequence[Mapping[int, Row]], classes: Sequence[int], name: str, title: str
) -> Table:
    """Return a table of acceptance lengths. parts: of each method, by class: a first number of tokens, or a turn."""
    columns = [Column("method", "method")]
    for begin in classes:
        heading = f"{begin:,}" if name.startswith("by_turn") else f"{begin:,}+" if begin else f"below {SHORTEST}"
        columns += [Column(str(begin), heading, ".2f"), Column(f"{begin}_ci", "", below=True)]
    cells = []
    for row, own in zip(rows, parts, strict=True):
        numbers = {str(begin): part["tau"] for begin, part in own.items()}
        intervals = {f"{begin}_ci": format_interval(part["tau_ci95"]) for begin, part in own.items()}
        cells.append({"method": row["method"], **numbers, **intervals})
    note = "Of rounds, without the prefill; 95 % bootstrap intervals over prompts."
    return Table(name, title, columns, cells, note)


def numbers_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the lines of results.csv for one method: all prompts, each task, each class of context length and turn.

    Intervals are two numbers. Speeds belong to whole answers, and classes of rounds have none.
    """
    names = ("prompts", "tokens", "tokens_per_s", "speedup", "tau", "acceptance_rate", "matches_ar")
    about = {"method": row["method"], "temperature": row["temperature"]}

    def line(part: str, own: Row) -> dict[str, Any]:
        found = {name: own.get(name) for name in names}
        for name in ("speedup", "tau"):
            found[f"{name}_low"], found[f"{name}_high"] = own.get(f"{name}_ci95") or (None, None)
        places = own.get("accepted_by_place") or ()
        return {**about, "part": part, "rounds": own.get("rounds"), **found} | {
            f"accepted_{n}": places[n - 1] if n <= len(places) else None for n in range(1, PLACES + 1)
        }

    yield line("all", row)
    for task, own in (row.get("by_task") or {}).items():
        yield line(f"task {task}", own)
    for own in row.get("by_context") or ():
        yield line(f"context from {own['from']}", own)
    for own in row.get("by_turn") or ():
        yield line(f"turn {own['turn']}", own)
