"""Why a setting was chosen: on the screen, and as tables and charts of results.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.console import Column, Table, json_values
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.cost.machine import DecodingCosts
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.tuning.candidates import Predicted, best_of_families

COLUMNS = (
    Column("setting", "setting"),
    Column("tau", "tau", ".2f"),
    Column("predicted", "tokens/s, predicted", ",.0f"),
    Column("speedup", "speed-up, predicted", ".2fx"),
    Column("measured", "tokens/s, measured", ",.0f"),
    Column("measured_speedup", "speed-up, measured", ".2fx"),
    Column("chosen", ""),
)


@dataclass(frozen=True)
class Choice:
    """All settings with what is expected of them, tokens/s of those that were decoded (label ->), the costs that the
    expectation rests on, and seconds spent on each part. precisions: tokens/s of the choice by what its drafts are
    computed in."""

    predicted: Sequence[Predicted]
    measured: Mapping[str, float]
    costs: DecodingCosts
    spent: Mapping[str, float]
    precisions: Mapping[str, float] = field(default_factory=dict)

    @property
    def precision(self) -> str | None:
        """The fastest one for drafts; None where none was measured."""
        return max(self.precisions, key=lambda bits: self.precisions[bits], default=None)

    @property
    def label(self) -> str:
        """The fastest of those that were measured, or else of those that were predicted."""
        if self.measured:
            return max(self.measured, key=lambda label: self.measured[label])
        return max(self.predicted, key=lambda item: item.tokens_per_s).label

    @property
    def speedup(self) -> float:
        """Over decoding without a draft, by what the choice rests on."""
        speeds = self.measured or {item.label: item.tokens_per_s for item in self.predicted}
        return speeds[self.label] / speeds[BASELINE]

    @property
    def basis(self) -> str:
        return "measured" if self.measured else "predicted"

    def expected(self, label: str) -> Predicted:
        return next(item for item in self.predicted if item.label == label)


def rows(choice: Choice) -> list[dict[str, Any]]:
    """The best setting of every family, fastest first."""
    base, found = choice.expected(BASELINE).tokens_per_s, []
    for item in best_of_families(choice.predicted):
        measured = choice.measured.get(item.label)
        row = {
            "family": item.family,
            "setting": item.label,
            "tau": item.tau,
            "predicted": item.tokens_per_s,
            "speedup": item.tokens_per_s / base,
            "measured": measured,
            "measured_speedup": measured / choice.measured[BASELINE] if measured is not None else None,
            "chosen": "chosen" if item.label == choice.label else "",
        }
        found.append(json_values(row))
    return found


def how_taken(choice: Choice) -> str:
    return (
        f"The best of each family, of {len(choice.predicted)} settings. Predicted: rounds replayed from one recording "
        "a drafter, times measured costs. Measured: decoded for real, interleaved. "
        + precision_words(choice)
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in choice.spent.items())
        + "."
    )


def precision_words(choice: Choice) -> str:
    """What drafts are computed in, and by which speeds; nothing where that was not open."""
    if choice.precision is None:
        return ""
    speeds = ", ".join(f"{bits} {speed:,.0f}" for bits, speed in choice.precisions.items())
    return f"Drafts in {choice.precision}, of tokens/s by --draft-precision: {speeds}. "


def tables(choice: Choice) -> list[Table]:
    """Tables for results.json; the first is for the screen."""
    table = Table("settings", "The best settings of each family", COLUMNS, rows(choice), how_taken(choice))
    found = [table, *length_rows(choice), drawn_data("target-cost", target_rows(choice.costs))]
    return [*found, drawn_data("draft-cost", draft_rows(choice.costs))] if choice.costs.drafters else found


def length_rows(choice: Choice) -> Iterator[Table]:
    """Predicted speed by the length of chains, and by the size of trees: the best at each."""
    for name, setting in (("predicted-by-k", "k"), ("predicted-by-nodes", "nodes")):
        best: dict[tuple[str, int], Predicted] = {}
        for item in sorted(choice.predicted, key=lambda item: item.tokens_per_s):
            if hasattr(item.named.method, setting):
                best[item.family, getattr(item.named.method, setting)] = item
        points = [
            {"family": family, "length": length, "setting": item.label, "tau": item.tau,
             "tokens_per_s": item.tokens_per_s}
            for (family, length), item in sorted(best.items(), key=lambda entry: entry[0])
        ]  # fmt: skip
        if points:
            yield drawn_data(name, points)


def target_rows(costs: DecodingCosts) -> list[dict[str, Any]]:
    """Milliseconds of a target call by the rows that it reads, behind `context` kept tokens."""
    return [
        {"rows": count, "kind": kind, "milliseconds": 1000 * seconds, "context": costs.context}
        for kind, curve in (("chain", costs.target), ("tree", costs.tree))
        for count, seconds in curve.items()
    ]


def draft_rows(costs: DecodingCosts) -> list[dict[str, Any]]:
    """Milliseconds of a drafter's steps."""
    return [
        {"drafter": name, "step": step, "milliseconds": 1000 * seconds}
        for name, cost in costs.drafters.items()
        for step, seconds in (("first of a round", cost.first), ("every further one", cost.step))
    ]


def summary(choice: Choice) -> dict[str, Any]:
    """Flat, for whoever quotes it."""
    best = choice.expected(choice.label)
    found = {
        "chosen": choice.label,
        "draft_precision": choice.precision,
        **{f"{bits}_tokens_per_s": speed for bits, speed in choice.precisions.items()},
        "speedup": choice.speedup,
        "basis": choice.basis,
        "tau": best.tau,
        "predicted_tokens_per_s": best.tokens_per_s,
        "measured_tokens_per_s": choice.measured.get(choice.label),
        "settings": len(choice.predicted),
        **{f"{name}_s": seconds for name, seconds in choice.spent.items()},
    }
    return json_values(found)
