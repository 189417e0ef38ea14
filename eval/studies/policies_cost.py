"""What one more drafted token costs on this machine, in rounds without a draft: c of the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftsmith.data.manifest import read_json, write_json
from draftsmith.eval.clocks import clock_of
from draftsmith.eval.costs import AR, ROWS, Costs, measure_costs
from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods import parse_method
from draftsmith.eval.methods.base import Models
from draftsmith.eval.provenance import cpu_name
from draftsmith.eval.studies.common import StudyConfig
from draftsmith.modules.types import SamplingParams

FAMILY = {"draft": "spec", "eagle": "eagle"}
PROBED = (2, 6)  # drafted tokens of the rounds that tell what a round takes beyond its forwards
MOST_ROWS = 17  # of the target's curve whose slope counts: no chain is much longer


def c_of(costs: Costs, drafter: str) -> float:
    """(draft step + what one more row costs the target) / (target call of one row, and what a round with a draft takes
    beyond its steps)."""
    cost, extra = costs.drafters[drafter], costs.families[FAMILY[drafter]]
    rows = [count for count in ROWS if count <= MOST_ROWS]
    slope = float(np.polyfit(rows, [costs.target[count] for count in rows], 1)[0])
    fixed = costs.target_s(1) + extra.round + max(cost.first - cost.step, 0.0)
    return (cost.step + extra.step + max(slope, 0.0)) / fixed


def own_c(config: StudyConfig, models: Models, drafter: str, prompts: Sequence[BenchPrompt]) -> float:
    """Measured once: kept in `output`, and taken from there on the same machine."""
    path = config.output / f"cost-{drafter}.json"
    machine = {"cpu": cpu_name(), "device": config.device, "threads": config.num_threads, "dtype": config.dtype}
    if path.exists() and (kept := read_json(path))["machine"] == machine:
        return c_of(Costs.from_json(kept["costs"]), drafter)
    family = FAMILY[drafter]
    probes = {AR: [parse_method(AR)], family: [parse_method(f"{family}:k={k}") for k in PROBED]}
    costs = measure_costs(models, prompts, probes, SamplingParams(), config.seed, clock_of(config.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": machine, "costs": costs.to_json()})
    return c_of(costs, drafter)
