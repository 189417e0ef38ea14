"""What settings of `auto` came to in a run: c of the policies that weigh a token against its time, and the times of
trees.

A clock gives other numbers every time, and drafts of other lengths with them. So they are kept with a run's results,
and an interrupted run, or another one, can go by them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.provenance import RESULTS
from draftsmith.eval.cost.step_cost import measure_step_cost, own_clock
from draftsmith.eval.cost.tree_times import tree_times
from draftsmith.modules.acceptance.tree_rule import TreeTimes
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.types import InputError

KINDS = ("step_costs", "tree_times")  # in results


@dataclass(frozen=True)
class MeasuredTimes:
    """`MachineTimes` of a run, each measured once. Both hold JSON values, and are kept with the run's results.

    step_costs: c by what drafts (`cost.step_cost`). tree_times: seconds, by what was timed (`cost.tree_times`).
    """

    step_costs: dict[str, float] = field(default_factory=dict)
    tree_seconds: dict[str, Any] = field(default_factory=dict)

    def step_cost(self, models: Models, drafter: str, rows: int | None = None) -> float:
        key = drafter if rows is None else f"{drafter}, batches of {rows}"
        if key not in self.step_costs:
            self.step_costs[key] = measure_step_cost(models, drafter, rows, own_clock(models))
            about = f"a drafted token's time in rounds without a draft, measured here ({key})"
            print(f"draftsmith: c = {self.step_costs[key]:.3f}: {about}", file=sys.stderr)
        return self.step_costs[key]

    def tree_times(self, models: Models, trees: str, probe: Callable[[int], Drafter]) -> TreeTimes:
        return tree_times(models, trees, probe, self.tree_seconds)


def resolved_auto(models: Models) -> dict[str, dict[str, Any]]:
    """What settings of `auto` came to in this run, for `meta` of results."""
    assert isinstance(models.times, MeasuredTimes)
    return {"step_costs": dict(models.times.step_costs), "tree_times": dict(models.times.tree_seconds)}


def go_by(models: Models, found: Mapping[str, Any]) -> None:
    """Take these in the place of measuring; what is not among them is measured when it is asked for."""
    assert isinstance(models.times, MeasuredTimes)
    models.times.step_costs.update(found.get("step_costs", {}))
    models.times.tree_seconds.update(found.get("tree_times", {}))


def auto_of_run(directory: Path) -> dict[str, dict[str, Any]]:
    """As `resolved_auto`, of a finished run.

    Raises:
        InputError: there is none, or it holds something else.
    """
    path = Path(directory) / RESULTS
    remedy = "Name the --output of a finished `draftsmith eval bench` or `draftsmith eval tune`."
    if not path.is_file():
        raise InputError("costs", f"no {RESULTS} in {directory}", "the directory of a finished run", remedy)
    meta = read_object(path, {}).get("meta")
    found: dict[str, Any] = {kind: meta.get(kind, {}) if isinstance(meta, dict) else None for kind in KINDS}
    costs = found["step_costs"]
    numbers = isinstance(costs, dict) and all(isinstance(c, int | float) and c > 0 for c in costs.values())
    if not numbers or not isinstance(found["tree_times"], dict) or not any(found.values()):
        raise InputError("costs", f"{path} without measured costs", "a run that measured some", remedy)
    return found
