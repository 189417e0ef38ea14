"""Recipes against each other (recipes.py): tau as a mean over seeds, what it is to the base recipe's, and how often a
draft's tokens are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, format_interval
from draftsmith.eval.bench.results import MeasuredResamples, Row, copying, totals_of
from draftsmith.eval.bootstrap import NUM_RESAMPLES, Floats

K, TEMPERATURES = 5, {"greedy": 0.0, "T=1": 1.0}
SeedRows = Sequence[Sequence[Row]]  # of every seed, a row for each test prompt, in one order


class Drawn:
    """Bootstrap resamples of test prompts and of seeds: the same ones for all that is compared."""

    def __init__(self, base: SeedRows):
        self.prompts = MeasuredResamples(base[0], 0)
        self._seeds = np.random.default_rng(0).integers(len(base), size=(len(base), NUM_RESAMPLES))

    def tau(self, runs: SeedRows) -> Floats:
        """[NUM_RESAMPLES]: mean over drawn seeds of tau over drawn prompts."""
        taus = np.stack([self.prompts.tau(rows) for rows in runs])
        return np.take_along_axis(taus, self._seeds, 0).mean(0)


def acceptance(runs: SeedRows) -> list[float]:
    """How often the first, second, ... token of a draft is accepted where those before it were, over all seeds."""
    rounds = [step for rows in runs for row in rows for step in row["rounds"]]
    reached = [[step for step in rounds if step["num_drafted"] > d and step["num_accepted"] >= d] for d in range(K)]
    return [sum(step["num_accepted"] > d for step in own) / max(1, len(own)) for d, own in enumerate(reached)]


def compared(runs: SeedRows, base: SeedRows) -> dict[str, Any]:
    """Tau, and its difference from and ratio to that of the base's runs with the same seeds; 95 % intervals."""
    taus, drawn = [[totals_of(rows).tau for rows in own] for own in (runs, base)], Drawn(base)
    (tau, other), (own_drawn, base_drawn) = map(np.mean, taus), map(drawn.tau, (runs, base))
    found: dict[str, Any] = {"tau": float(tau), "difference": float(tau - other), "ratio": float(tau / other)}
    resampled = {"tau": own_drawn, "difference": own_drawn - base_drawn, "ratio": own_drawn / base_drawn}
    for name, values in resampled.items():
        found[f"{name}_ci95"] = drawn.prompts.interval(partial(np.asarray, values))
    rows = [row for own in runs for row in own]
    return {**found, **copying(rows, rows), "seeds": taus[0], "acceptance": acceptance(runs)}


def modes_of(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The modes of one recipe and what was measured in each."""
    return [(mode, found[mode]) for mode in TEMPERATURES]


def tables(found: Sequence[Mapping[str, Any]], title: str) -> list[Table]:
    """found: of each recipe its name, settings, steps and cpu_s, and of each mode what `compared` gives."""
    first = [Column("recipe", "recipe"), Column("settings", "differs in")]
    taus, depths = [*first, Column("steps", "steps", "d"), Column("cpu_s", "CPU s", ".0f")], first[:1]
    rows = [{column.key: own[column.key] for column in taus} for own in found]
    for mode in TEMPERATURES:
        for key, heading, form in (("tau", "tau", ".2f"), ("ratio", "to base", ".2fx")):
            taus += [Column(f"{mode} {key}", heading, form, mode), Column(f"{mode} {key}_ci95", "95 %", "", mode)]
        depths += [Column(f"{mode} {d + 1}", str(d + 1), ".2f", mode) for d in range(K)]
        places = {"tau_copying": "tau, copying", "tau_new": "tau, new"}
        depths += [Column(f"{mode} {key}", heading, ".2f", mode) for key, heading in places.items()]
        for row, part in zip(rows, (own[mode] for own in found), strict=True):
            row |= {f"{mode} {name}": part[name] for name in ("tau", "ratio", *places)}
            row |= {f"{mode} {name}_ci95": format_interval(part[f"{name}_ci95"]) for name in ("tau", "ratio")}
            row |= {f"{mode} {d + 1}": value for d, value in enumerate(part["acceptance"])}
    note = "CPU s: of the whole training, its start and one validation included."
    shares = [f"{own['copied_prompt'] + own['copied_answer']:.0%} ({mode})" for mode, own in modes_of(found[0])]
    copied = f"{' and '.join(shares)} of the answers' tokens go on with a repetition. "
    copied += "Tau, copying and new: of the rounds whose first token does, and of the others."
    accepted = f"{title}: how often a draft's token is accepted where those before it were"
    return [
        Table("tau", f"{title}: tokens a target call", taus, rows, note),
        Table("depth", accepted, depths, rows, copied),
    ]
