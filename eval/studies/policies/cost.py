"""This machine's own c, measured once for a study."""

from __future__ import annotations

from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.results import cpu_name
from draftsmith.eval.studies.common import StudyConfig
from draftsmith.modules.drafters.methods import Models


def own_c(config: StudyConfig, models: Models, drafter: str) -> float:
    """c (`MeasuredTimes.step_cost`); kept in `output`, and taken from there on the same machine: policies that are
    chosen and decoded with it are the same when the study goes on."""
    path = config.output / f"cost-{drafter}.json"
    machine = {"cpu": cpu_name(), "device": config.device, "threads": config.num_threads, "dtype": config.dtype}
    if path.exists() and (kept := read_object(path, {"machine": dict, "c": float}))["machine"] == machine:
        return float(kept["c"])
    c = models.times.step_cost(models, drafter)
    make_directory(path.parent)
    write_json(path, {"machine": machine, "c": c})
    return c
