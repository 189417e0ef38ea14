"""Finished runs as the report reads them, and which of them may stand in one table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.data.store.manifest import flatten
from draftsmith.data.store.reading import check_shape, read_json
from draftsmith.eval.bench.compare import SAME_SETTINGS, SAME_SPEED
from draftsmith.eval.bench.results import PER_PROMPT, RESULTS
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.report.training import is_going_on, is_training, read_training, read_under_way
from draftsmith.modules.types import InputError

MEASURE = "Measure it again."
NUMBER, INTERVAL = (float, None), ([(float, None)], None)
# What a part of a benchmark may say; earlier versions say less.
NUMBERS = (
    "tokens_per_s speedup tau wall_s cpu_s prompts tokens num_target_calls num_draft_tokens num_accepted num_discarded "
    "draft_calls discard_rate verification_rate distinct_4grams num_differing macro_speedup macro_tau ended "
    "copied_prompt copied_answer tau_copying tau_new speed_bench_tau"
)
PART: dict[str, Any] = {
    **{f"{name}?": NUMBER for name in NUMBERS.split()},
    **{f"{name}?": INTERVAL for name in ("speedup_ci95", "tau_ci95")},
    "matches_ar?": (bool, None),
}
META: dict[str, Any] = {
    **{f"{name}?": dict for name in ("settings", "hardware", "prompts")},
    **{f"{name}?": (dict, None) for name in ("versions", "models")},
    "clock?": str,
}
TABLE = {"name": str, "title?": str, "note?": str, "columns?": [{"key": str, "title": str}], "rows?": [dict]}
METHOD = {"method": str, "temperature?": float, **PART, "by_task?": {"*": PART}}
SHAPE = {"meta": META, "methods?": [METHOD], "tables?": [TABLE]}
COLUMNS = ("method", "id", "tokens", "wall_s", "cpu_s")  # of prompts.parquet, that are drawn


@dataclass(frozen=True)
class Run:
    """A directory with results.json. name: of the directory, with its parent's where another run has the same."""

    path: Path
    name: str
    results: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.results["meta"]

    @property
    def kind(self) -> str:
        # Results of schema version 1 are all of benchmarks, and do not say so.
        return str(self.meta.get("kind", "bench"))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.meta.get("settings", {})


def read_runs(paths: Sequence[Path], watching: bool = False) -> list[Run]:
    """watching: runs that go on are shown as far as they are.

    Raises:
        InputError: a path without complete results, or with results of something else.
    """
    directories = [path.parent if path.name == RESULTS else path for path in paths]
    resolved = [path.resolve() for path in directories]
    if twice := [path for number, path in enumerate(directories) if resolved[number] in resolved[:number]]:
        raise InputError("runs", f"{twice[0]} twice", "each run once", "Name it once.")
    seen = Counter(path.name for path in resolved)
    names = [path.name if seen[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in resolved]
    return [Run(path, name, _read(path, watching)) for path, name in zip(directories, names, strict=True)]


def _read(directory: Path, watching: bool) -> Mapping[str, Any]:
    if is_training(directory):
        return read_training(directory)
    if not directory.is_dir():
        raise InputError("runs", f"no directory {directory}", "directories of finished runs", "Check the path.")
    if watching and is_going_on(directory):
        return read_under_way(directory)
    if not (directory / RESULTS).exists():
        remedy = "Run its command again: it continues with what is left."
        raise InputError("runs", f"no {RESULTS} in {directory}", "a finished run, which ends by writing it", remedy)
    results = read_json(directory / RESULTS, MEASURE)
    fits = isinstance(results, dict) and isinstance(results.get("meta"), dict)
    measured = [results[key] for key in ("methods", "tables") if key in results] if fits else []
    if not any(isinstance(rows, list) for rows in measured):
        expected = "results of `eval bench` or of a study"
        raise InputError("runs", f"other JSON in {directory / RESULTS}", expected, "Pass another directory.")
    if not any(measured):
        raise InputError(str(directory / RESULTS), "nothing measured", "rows of a method or a table", MEASURE)
    check_shape(directory / RESULTS, results, SHAPE, MEASURE)
    try:
        from_json(results)
    except TypeError as error:  # of a column
        found = f"tables that cannot be shown ({error})"
        raise InputError(str(directory / RESULTS), found, "those of a study of this version", MEASURE) from error
    return results


def comparable(runs: Iterable[Run]) -> list[list[Run]]:
    """Benchmarks that may share a table, in the order given; a study is always alone."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        key = json.dumps(basis(run), sort_keys=True) if run.kind == "bench" else str(number)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def basis(run: Run) -> dict[str, Any]:
    """What two benchmarks must share before their rows are compared, flat: models, prompts, sampling, machine."""
    meta = run.meta
    machine = {key: meta.get("hardware", {}).get(key) for key in ("cpu", "gpu")}
    return flatten(
        {
            "target": meta.get("target"),
            "prompts": meta.get("prompts", {}).get("sha256"),
            "temperatures": temperatures(run),
            "clock": meta.get("clock"),
            "hardware": machine,
            "settings": {key: run.settings.get(key) for key in (*SAME_SETTINGS, *SAME_SPEED)},
        }
    )


def temperatures(run: Run) -> list[float]:
    """Temperatures of a benchmark's rows, rising."""
    return sorted({temperature_of(run, row) for row in run.results.get("methods", [])})


def temperature_of(run: Run, row: Mapping[str, Any]) -> float:
    """Temperature of one row; results of one temperature name it in the settings only."""
    return float(row.get("temperature", run.settings.get("temperature", 0.0)))


def prompt_rows(run: Run) -> list[dict[str, Any]]:
    """What is drawn of a benchmark's rows, one for each method, temperature, prompt and turn; none where they were not
    kept."""
    path = run.path / PER_PROMPT
    if not path.exists():
        return []
    expected = "rows of `draftsmith eval bench`"
    try:
        file = pq.ParquetFile(path)
        known = file.schema_arrow.names
        if absent := [name for name in COLUMNS if name not in known]:
            raise InputError(str(path), f"no column {absent[0]}", expected, MEASURE)
        return file.read([*COLUMNS, *(name for name in ("temperature", "task") if name in known)]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        found = f"unreadable ({' '.join(str(error).split())})"
        raise InputError(str(path), found, expected, MEASURE) from error
