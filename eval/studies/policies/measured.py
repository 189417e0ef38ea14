"""What is measured on the clock: this machine's own c, and the chosen settings decoded for real, beside what was
replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.results import cpu_name
from draftsmith.eval.report.tables import plain
from draftsmith.eval.studies.common import StudyConfig, bench_directory, measured
from draftsmith.eval.studies.forward_times import bench_rows, gain_interval
from draftsmith.eval.studies.policies.comparison import Chosen, PolicyComparison
from draftsmith.eval.studies.policies.families import FIXED, Policy
from draftsmith.modules.drafters.methods import Models

HEAD, FREE, LOOKING = "best head", "best training-free", "online with repetitions"


def cross_check(
    config: StudyConfig, compared: PolicyComparison, places: Mapping[str, Path], limit: int
) -> list[dict[str, Any]]:
    """One row a setting: the fixed K that the cost model chose and its neighbours, the best head's policy, the best
    training-free one; throughput over the fastest of the fixed K, counts beside those of the replay.

    Settings are those of this machine's c, on the first `limit` reported prompts.
    """
    scene, at = compared.scene, compared.own
    longest = scene.test.depth
    k = int(at.fixed.policy.value)
    roles: dict[str, tuple[str, Policy]] = {}

    def add(role: str, policy: Policy) -> None:
        method = policy.method(scene.drafter, at.c)
        assert method is not None
        roles.setdefault(method, (role, policy))

    for near in (k, k - 1, k + 1):
        if 1 <= near <= longest:
            add(FIXED, Policy("k", near))
    head = at.best("head")
    for role, chosen in ((HEAD, head), (FREE, at.best("free")), (LOOKING, at.best("looking"))):
        if chosen is not None:
            add(role, chosen.policy)
    instead: dict[str, Any] = {"limit": limit}
    if head is not None:
        instead["acceptance"] = str(places[head.policy.head])
    name = f"bench-{scene.drafter}"
    rows = measured(config, list(roles), scene.params, name, **instead)
    single = bench_rows(bench_directory(config, scene.params, name))
    base = max((method for method, (role, _) in roles.items() if role == FIXED), key=lambda m: rows[m]["tokens_per_s"])
    found = []
    for method, (role, policy) in roles.items():
        replayed = compared.totals(at, Chosen(at.fixed.family, policy, 0.0), limit)
        row = rows[method]
        ends = None if method == base else gain_interval(single, method, base, config.clock, config.seed)
        low, high = ends or (None, None)
        found.append(
            {
                "scene": scene.title, "drafter": scene.drafter, "mode": scene.mode, "role": role, "method": method,
                "is_base": method == base,
                **{key: row[key] for key in ("prompts", "tokens_per_s", "speedup", "tau", "discard_rate")},
                "gain": row["tokens_per_s"] / rows[base]["tokens_per_s"] - 1, "low": low, "high": high,
                "tau_replayed": replayed.tau, "discard_replayed": replayed.discard_rate,
            }
        )  # fmt: skip
    return [plain(row) for row in found]


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
