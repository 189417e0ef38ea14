"""Why a setting was chosen: on the screen, and as tables and charts of results.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as ScreenTable

from draftsmith.eval.bench.tables import plain_table
from draftsmith.eval.cost.machine import AR, DecodingCosts
from draftsmith.eval.report.figures import Axis, Chart, Column, Figure, Table, formatted, plain
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


def reasoning_table(choice: Choice) -> ScreenTable:
    table = plain_table(caption=how_taken(choice), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column.title, overflow="fold", justify="right" if column.format else "left")
    for row in rows(choice):
        cells = [formatted(row[column.key], column.format) for column in COLUMNS]
        table.add_row(*cells, style="bold" if row["chosen"] else None)
    return table


def how_taken(choice: Choice) -> str:
    return (
        f"The best of each family, of {len(choice.predicted)} settings. Predicted: rounds replayed from one recording "
        "a drafter, times measured costs. Measured: decoded for real, interleaved. "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in choice.spent.items())
        + "."
    )


def figures(choice: Choice) -> list[Figure]:
    """For results.json."""
    table = Table("settings", "The best settings of each family", COLUMNS, rows(choice), how_taken(choice))
    found: list[Figure] = [table, *length_charts(choice), target_chart(choice.costs)]
    return [*found, draft_chart(choice.costs)] if choice.costs.drafters else found


def length_charts(choice: Choice) -> Iterator[Chart]:
    """Predicted speed by the length of chains, and by the size of trees: the best at each."""
    chains: dict[tuple[str, int], Predicted] = {}
    trees: dict[tuple[str, int], Predicted] = {}
    for item in choice.predicted:
        settings = dict(part.split("=") for part in item.label.split(":")[1:])
        if "nodes" in settings:
            keep_best(trees, (item.family, int(settings["nodes"])), item)
        elif "k" in settings:
            keep_best(chains, (item.family, int(settings["k"])), item)
    for name, title, axis, best in (
        ("predicted-by-k", "Predicted speed by drafted tokens a round", "drafted tokens K", chains),
        ("predicted-by-nodes", "Predicted speed by the size of the tree", "nodes", trees),
    ):
        if best:
            points = [
                {"family": family, "length": length, "setting": item.label, "tau": plain(item.tau),
                 "tokens_per_s": plain(item.tokens_per_s)}
                for (family, length), item in sorted(best.items())
            ]  # fmt: skip
            yield Chart(
                name, title, "line", points, Axis("length", axis), Axis("tokens_per_s", "tokens/s", ",.0f"),
                series="family", series_title="family", hover=("setting", "tau"),
                note="Each line's highest point is the length that pays best on this machine.",
            )  # fmt: skip


def keep_best(best: dict[tuple[str, int], Predicted], key: tuple[str, int], item: Predicted) -> None:
    if key not in best or item.tokens_per_s > best[key].tokens_per_s:
        best[key] = item


def target_chart(costs: DecodingCosts) -> Chart:
    points = [
        {"rows": count, "kind": kind, "milliseconds": plain(1000 * seconds)}
        for kind, curve in (("chain", costs.target), ("tree", costs.tree))
        for count, seconds in curve.items()
    ]
    return Chart(
        "target-cost", "What one target call costs by the rows it reads", "line", points, Axis("rows", "rows read"),
        Axis("milliseconds", "milliseconds", ".2f", zero=True), series="kind", series_title="rows form a",
        note=f"The flatter the line, the more drafted tokens pay. Medians, behind {costs.context} kept tokens.",
    )  # fmt: skip


def draft_chart(costs: DecodingCosts) -> Chart:
    points = [
        {"drafter": name, "step": step, "milliseconds": plain(1000 * seconds)}
        for name, cost in costs.drafters.items()
        for step, seconds in (("first of a round", cost.first), ("every further one", cost.step))
    ]
    return Chart(
        "draft-cost", "What a step of each drafter costs", "bar", points, Axis("drafter", "drafter", scale="ordinal"),
        Axis("milliseconds", "milliseconds", ".2f", zero=True), series="step", series_title="step",
        note="A step drafts one token of a chain, or one level of a tree of so many nodes a level.",
    )  # fmt: skip


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
