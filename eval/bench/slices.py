"""Slices of traffic: which classes of recorded answers a drafter serves worse than the others, beyond doubt.

A slice is a class of a division, such as the answers in German; the rest are the other classes of that division. Of
many slices some are low by chance: intervals hold for all slices of a method at once (`Resamples.simultaneous`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.eval.bench.results import FEWEST_PROMPTS, FEWEST_ROUNDS, NO_VALUE, OF_ROUNDS, Floats, Resamples, Row

Sums = tuple[Floats, Floats]  # emitted tokens and target calls [N] of N answers
Divided = Mapping[str, Mapping[str, Sums]]  # division -> class -> sums
OVERLAP = 0.5  # of a slice's tokens that others have too, from which on it is said
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


def slices_of(divided: Divided, resamples: Resamples, card: Mapping[str, Any] | None) -> list[Row]:
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
            fewest = min(calls, other_calls, key=resamples.num_owners)
            if min(calls.sum(), other_calls.sum()) < FEWEST_ROUNDS or resamples.num_owners(fewest) < FEWEST_PROMPTS:
                continue
            tau, rest = float(tokens.sum() / calls.sum()), float(others.sum() / other_calls.sum())
            row = {"slice": f"{by}={name}", "by": by, "name": name, "share": float(tokens.sum() / all_tokens.sum())}
            rows.append({**row, "tau": tau, "rest_tau": rest, "difference": tau - rest, "card_tau": on_card.get(name)})
            taus.append(resamples.sums(tokens) / resamples.sums(calls).clip(min=1))
            differences.append(taus[-1] - resamples.sums(others) / resamples.sums(other_calls).clip(min=1))
            weights.append(fewest)
    for key, statistics in (("tau", taus), ("difference", differences)) if rows else ():
        intervals = resamples.simultaneous([row[key] for row in rows], statistics, weights)
        rows = [{**row, f"{key}_ci95": own} for row, own in zip(rows, intervals, strict=True)]
    return sorted(rows, key=lambda row: row["share"] * row["difference"])


def verdict(
    slices: Sequence[Row], divided: Divided, total: Sums, resamples: Resamples, card: Mapping[str, Any] | None
) -> list[str]:
    """Say which slices are below the rest, and how the answers outside of all of these compare with the head's card.

    slices: of `slices_of`. total: sums of all answers.
    """
    lines, outside = list[str](), np.ones(resamples.num_values, bool)
    for row in (row for row in slices if row["difference_ci95"][1] < 0):
        line = f"{row['slice']}: {row['share']:.0%} of the tokens, tau {row['tau']:.2f} where the rest has "
        line += f"{row['rest_tau']:.2f} ({format_interval(row['difference_ci95'], '+.2f', ' to ')})"
        line += f" and the card {row['card_tau']:.2f}" if row["card_tau"] is not None else ""
        if row["by"] not in OF_ROUNDS:
            tokens, calls = divided[row["by"]][row["name"]]
            named, outside = tokens[~outside].sum() / tokens.sum(), outside & (calls == 0)
            line += f"; {named:.0%} of it is in slices above" if named >= OVERLAP else ""
            # What has no value, or a comma in it, cannot be asked for.
            if row["name"] != NO_VALUE and "," not in row["name"]:
                line += f". Its prompts: --where {shlex.quote(row['slice'])}"
        lines.append(line)
    answers = "All answers" if outside.all() else "All other answers"
    about = f"{answers}: {beside(total[0] * outside, total[1] * outside, resamples, card)}"
    if lines or not slices:
        return [*lines, about]
    causes = "collect more answers; or the whole traffic is harder than what was measured, or the target has changed"
    return [f"None of {len(slices)} slices is below the rest with 95 % confidence: {causes}. {about}"]


def beside(tokens: Floats, calls: Floats, resamples: Resamples, card: Mapping[str, Any] | None) -> str:
    """Say tau of some answers [N], and whether it is as on the card, as far as both intervals tell."""
    if not calls.any():
        return "none"
    tau = float(tokens.sum() / calls.sum())
    interval = resamples.interval(resamples.sums(tokens) / resamples.sums(calls).clip(min=1))
    if card is None:
        return f"tau {tau:.2f} (no card of this method at this temperature)"
    margin = math.hypot(*((ends[1] - ends[0]) / 2 if ends else math.inf for ends in (interval, card["tau_ci95"])))
    found = "as measured" if abs(tau - card["tau"]) <= margin else "below" if tau < card["tau"] else "above"
    return f"tau {tau:.2f}, {found} (the card has {card['tau']:.2f})"


def slices_table(method: Mapping[str, Any]) -> Table:
    """Build the table of a method's slices, of its row in results.json."""
    cells = [
        {**row, **{f"{key}_ci": format_interval(row[f"{key}_ci95"], between=" to ") for key in ("tau", "difference")}}
        for row in method["slices"]
    ]
    name = f"slices-{method['method']}-t{method['temperature']:g}"
    return Table(name, f"Slices of the traffic, {method['method']}", COLUMNS, cells, NOTE)
