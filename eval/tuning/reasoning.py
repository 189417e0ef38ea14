"""Why a setting was chosen: on the screen, and as tables and charts of results.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.cost.machine import AR, DecodingCosts
from draftsmith.eval.report.tables import Column, Table, drawn_data, plain
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
    expectation rests on, and seconds spent on each part."""

    predicted: Sequence[Predicted]
    measured: Mapping[str, float]
    costs: DecodingCosts
    spent: Mapping[str, float]

    @property
    def label(self) -> str:
        """The fastest of those that were measured, or else of those that were predicted."""
        if self.measured:
            return max(self.measured, key=lambda label: self.measured[label])
        return max(self.predicted, key=lambda item: item.tokens_per_s).label

    @property
    def speeds(self) -> Mapping[str, float]:
        """What the choice rests on."""
        return self.measured or {item.label: item.tokens_per_s for item in self.predicted}

    @property
    def speedup(self) -> float:
        return self.speeds[self.label] / self.speeds[AR]

    @property
    def basis(self) -> str:
        return "measured" if self.measured else "predicted"

    def expected(self, label: str) -> Predicted:
        return next(item for item in self.predicted if item.label == label)


def rows(choice: Choice) -> list[dict[str, Any]]:
    """The best setting of every family, fastest first."""
    base = choice.expected(AR).tokens_per_s
    found = []
    for item in best_of_families(choice.predicted):
        measured = choice.measured.get(item.label)
        found.append(
            {
                "family": item.family,
                "setting": item.label,
                "tau": plain(item.tau),
                "predicted": plain(item.tokens_per_s),
                "speedup": plain(item.tokens_per_s / base),
                "measured": plain(measured),
                "measured_speedup": plain(measured / choice.measured[AR]) if measured is not None else None,
                "chosen": "chosen" if item.label == choice.label else "",
            }
        )
    return found


def how_taken(choice: Choice) -> str:
    return (
        f"The best of each family, of {len(choice.predicted)} settings. Predicted: rounds replayed from one recording "
        "a drafter, times measured costs. Measured: decoded for real, interleaved. "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in choice.spent.items())
        + "."
    )


def tables(choice: Choice) -> list[Table]:
    """Tables for results.json; the first is for the screen."""
    table = Table("settings", "The best settings of each family", COLUMNS, rows(choice), how_taken(choice))
    found = [table, *length_rows(choice), drawn_data("target-cost", target_rows(choice.costs))]
    return [*found, drawn_data("draft-cost", draft_rows(choice.costs))] if choice.costs.drafters else found


def length_rows(choice: Choice) -> Iterator[Table]:
    """Predicted speed by the length of chains, and by the size of trees: the best at each."""
    chains: dict[tuple[str, int], Predicted] = {}
    trees: dict[tuple[str, int], Predicted] = {}
    for item in choice.predicted:
        settings = dict(part.split("=") for part in item.label.split(":")[1:])
        if "nodes" in settings:
            keep_best(trees, (item.family, int(settings["nodes"])), item)
        elif "k" in settings:
            keep_best(chains, (item.family, int(settings["k"])), item)
    for name, best in (("predicted-by-k", chains), ("predicted-by-nodes", trees)):
        points = [
            {"family": family, "length": length, "setting": item.label, "tau": item.tau,
             "tokens_per_s": item.tokens_per_s}
            for (family, length), item in sorted(best.items())
        ]  # fmt: skip
        if points:
            yield drawn_data(name, points)


def keep_best(best: dict[tuple[str, int], Predicted], key: tuple[str, int], item: Predicted) -> None:
    if key not in best or item.tokens_per_s > best[key].tokens_per_s:
        best[key] = item


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
    return {
        "chosen": choice.label,
        "speedup": plain(choice.speedup),
        "basis": choice.basis,
        "tau": plain(best.tau),
        "predicted_tokens_per_s": plain(best.tokens_per_s),
        "measured_tokens_per_s": plain(choice.measured.get(choice.label)),
        "settings": len(choice.predicted),
        **{f"{name}_s": plain(seconds) for name, seconds in choice.spent.items()},
    }
