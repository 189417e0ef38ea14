"""What settings of `auto` came to in a run: c of the policies that weigh a token against its time, and the times of
trees.

A clock gives other numbers every time, and drafts of other lengths with them. So they are kept with a run's results,
and an interrupted run, or another one, can go by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.provenance import RESULTS
from draftsmith.eval.methods.base import Models
from draftsmith.modules.types import InputError

KINDS = {"step_costs": "step_costs", "tree_times": "measured"}  # in results, and of `Models`


def resolved_auto(models: Models) -> dict[str, dict[str, Any]]:
    """For `meta` of results: step_costs, c by what drafts (`cost.step_cost`); tree_times, by what was timed, seconds
    (`cost.tree_times`)."""
    return {kind: dict(getattr(models, name)) for kind, name in KINDS.items()}


def go_by(models: Models, found: Mapping[str, Any]) -> None:
    """Take these in the place of measuring; what is not among them is measured when it is asked for."""
    for kind, name in KINDS.items():
        getattr(models, name).update(found.get(kind, {}))


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
