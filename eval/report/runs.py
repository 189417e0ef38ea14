"""Reading of runs for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.eval.meta import MEASURE, RESULTS, SCHEMA_VERSION, read_results
from draftsmith.eval.report.training import is_training, read_training
from draftsmith.modules.drafters import HEADS
from draftsmith.modules.types import InputError

SHAPE: dict[str, Any] = {
    "meta": {f"{name}?": (dict, None) for name in ("settings", "hardware", "prompts", "versions", "models")},
    "methods?": [{"method": str, "temperature": float, "by_task?": {"*": dict}}],
    "tables?": [{"name": str, "columns?": [{"key": str, "title": str}], "rows?": [dict]}],
}


@dataclass(frozen=True)
class Run:
    """A run's directory and results; its name is the directory's, with the parent's if another run has the same."""

    path: Path
    name: str
    results: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.results["meta"]

    @property
    def kind(self) -> str:
        return str(self.meta.get("kind", "bench"))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.meta.get("settings", {})


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read finished runs, and trainings as far as they are.

    Raises:
        InputError: a path without complete results, or with results of something else.
    """
    directories = [path.parent if path.name == RESULTS else path for path in paths]
    resolved = [path.resolve() for path in directories]
    if twice := [path for number, path in enumerate(directories) if resolved[number] in resolved[:number]]:
        raise InputError("runs", f"{twice[0]} twice", "each run once", "Name it once.")
    seen = Counter(path.name for path in resolved)
    names = [path.name if seen[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in resolved]
    return [Run(path, name, checked_results(path)) for path, name in zip(directories, names, strict=True)]


def checked_results(directory: Path) -> Mapping[str, Any]:
    """Read and check results.json, or a training's metrics in the same form."""
    if is_training(directory):
        return read_training(directory)
    results = read_results(directory, SHAPE)
    meta = results["meta"]
    if results.get("methods") and meta.get("schema_version") != SCHEMA_VERSION:
        found = f"version {meta.get('schema_version')} of its form"
        raise InputError(str(directory / RESULTS), found, str(SCHEMA_VERSION), MEASURE)
    if not results.get("methods") and not results.get("tables"):
        raise InputError(str(directory / RESULTS), "nothing measured", "rows of a method or a table", MEASURE)
    return results


def temperatures(run: Run) -> list[float]:
    """Return the temperatures of a benchmark's rows, ascending."""
    return sorted({row["temperature"] for row in run.results.get("methods", [])})


def uses_head(method: str) -> bool:
    """Return whether a method drafts with a trained head."""
    return method.partition(":")[0].partition("@")[0].partition("-")[0] in HEADS or "drafter=" in method
