"""Slices of traffic: which classes of recorded answers a drafter serves worse than the others, beyond doubt.

A slice is a class of a division, such as the answers in German, beside the rest: the other classes of that division.
Of many slices some are low by chance, so that intervals hold for all slices of a method at once
(`Resamples.simultaneous`). A slice that costs much may be none of its own but part of another, which is said, too.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.eval.bench.results import FEWEST_PROMPTS, FEWEST_ROUNDS, NO_VALUE, OF_ROUNDS, Floats, Resamples, Row

Sums = tuple[Floats, Floats]  # emitted tokens and target calls [N] of N answers
Divided = Mapping[str, Mapping[str, Sums]]  # division -> class -> sums
OVERLAP = 0.5  # of a slice's tokens that are in another one too, from which on it is said
COLUMNS = (
    Column("slice", "slice"),
    Column("share", "tokens", ".0%"),
    Column("tau", "tau", ".2f"),
    Column("tau_ci", "95 % CI", below=True),
    Column("rest_tau", "rest", ".2f"),
    Column("difference", "tau - rest", "+.2f"),
    Column("difference_ci", "95 % CI", below=True),
    Column("card_tau", "card", ".2f"),
)
NOTE = "Rest: the other classes of a slice's division. The intervals hold for all slices at once. Card: the head's own."


def slices_of(divided: Divided, resamples: Resamples, card: Row | None) -> list[Row]:
    """Compare each class with the rest of its division; those that cost most, by share and shortfall, come first.

    Classes that have, or leave, fewer than FEWEST_PROMPTS texts or FEWEST_ROUNDS calls are left out.

    resamples: of the answers, over texts. card: what the head's `measured.json` has of this method.
    """
    rows, taus, differences, weights = list[Row](), list[Floats](), list[Floats](), list[Floats]()
    for by, classes in divided.items():
        all_tokens, all_calls = np.sum([*classes.values()], 0)
        on_card = {part["name"]: part["tau"] for part in (card or {}).get("by", {}).get(by, ())}
        for name, (tokens, calls) in classes.items():
            others, other_calls = all_tokens - tokens, all_calls - calls
            fewest = min(resamples.num_owners(own) for own in (calls, other_calls))
            if min(calls.sum(), other_calls.sum()) < FEWEST_ROUNDS or fewest < FEWEST_PROMPTS:
                continue
            tau, rest = float(tokens.sum() / calls.sum()), float(others.sum() / other_calls.sum())
            numbers = {"share": float(tokens.sum() / all_tokens.sum()), "tau": tau, "rest_tau": rest}
            rows.append({"by": by, "name": name, **numbers, "difference": tau - rest, "card_tau": on_card.get(name)})
            taus.append(resamples.sums(tokens) / resamples.sums(calls).clip(min=1))
            differences.append(taus[-1] - resamples.sums(others) / resamples.sums(other_calls).clip(min=1))
            weights.append(min(calls, other_calls, key=resamples.num_owners))
    for key, statistics in (("tau", taus), ("difference", differences)) if rows else ():
        intervals = resamples.simultaneous([row[key] for row in rows], statistics, weights)
        rows = [{**row, f"{key}_ci95": own} for row, own in zip(rows, intervals, strict=True)]
    return sorted(rows, key=lambda row: row["share"] * row["difference"])


def verdict(slices: Sequence[Row], divided: Divided, total: Sums, resamples: Resamples, card: Row | None) -> list[str]:
    """Say which slices are below the rest, and how the answers outside of all of these compare with the head's card.

    slices: of `slices_of`. total: sums of all answers.
    """
    lines, named, outside = list[str](), dict[str, Sums](), np.ones(resamples.num_values, bool)
    for row in (row for row in slices if row["difference_ci95"][1] < 0):
        lines.append(f"{label(row)}: {row['share']:.0%} of the tokens, tau {row['tau']:.2f} where the rest has ")
        lines[-1] += f"{row['rest_tau']:.2f} ({format_interval(row['difference_ci95'], '+.2f', ' to ')})"
        lines[-1] += f" and the card {row['card_tau']:.2f}" if row["card_tau"] is not None else ""
        if row["by"] not in OF_ROUNDS:
            tokens, calls = divided[row["by"]][row["name"]]
            shares = {other: tokens[own[1] > 0].sum() / tokens.sum() for other, own in named.items()}
            lines[-1] += "".join(f"; {part:.0%} of it is {other}" for other, part in shares.items() if part >= OVERLAP)
            named[label(row)], outside = (tokens, calls), outside & (calls == 0)
            # What has no value, or a comma in it, cannot be asked for.
            if row["name"] != NO_VALUE and "," not in row["name"]:
                lines[-1] += f". Its prompts: --where {shlex.quote(label(row))}"
    tokens, calls = (own * outside for own in total)
    about = beside(tokens, calls, resamples, card) if calls.any() else "none"
    if lines:
        return [*lines, f"{'All other answers' if named else 'All answers'}: {about}"]
    compared = f"None of {len(slices)} slices is below the rest with 95 % confidence"
    causes = "collect more answers; or the whole traffic is harder than what was measured, or the target has changed"
    return [f"{compared}: {causes}. All answers: {about}" if slices else f"No slices to compare. All answers: {about}"]


def label(row: Row) -> str:
    return f"{row['by']}={row['name']}"


def beside(tokens: Floats, calls: Floats, resamples: Resamples, card: Row | None) -> str:
    """Say tau of some answers [N], and whether it is as on the card, as far as both intervals tell."""
    tau = float(tokens.sum() / calls.sum())
    interval = resamples.interval(resamples.sums(tokens) / resamples.sums(calls).clip(min=1))
    if card is None:
        return f"tau {tau:.2f} (no card of this method at this temperature)"
    margin = math.hypot(*((ends[1] - ends[0]) / 2 if ends else math.inf for ends in (interval, card["tau_ci95"])))
    found = "as measured" if abs(tau - card["tau"]) <= margin else "below" if tau < card["tau"] else "above"
    return f"tau {tau:.2f}, {found} (the card has {card['tau']:.2f})"


def slices_table(method: Row, slices: Sequence[Row]) -> Table:
    """Build the table of a method's slices. method: its row in results.json."""
    ends = {"tau_ci": "tau_ci95", "difference_ci": "difference_ci95"}
    cells = [
        {**row, "slice": label(row), **{key: format_interval(row[own], between=" to ") for key, own in ends.items()}}
        for row in slices
    ]
    name, title = f"slices-{method['method']}-t{method['temperature']:g}", f"Slices of the traffic, {method['method']}"
    return Table(name, title, COLUMNS, cells, NOTE)
