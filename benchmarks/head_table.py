"""Make EAGLE-2's table 1 on the shipped models: `python benchmarks/head_table.py --output DIR` (benchmarks/README.md),
in the repository's folder.

Heads of every kind are trained on the same answers for the same CPU seconds with several seeds, as in recipes.py. Then
each seed's heads, and the methods without a head, decode the same test prompts, greedy and at T=1, beside `ar`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.benchmarks import recipes
from draftsmith.benchmarks.recipes import TEMPERATURES, RecipesConfig, bench
from draftsmith.data.console import Column, Table, format_interval, print_text
from draftsmith.data.store.manifest import resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.results import BASELINE, Row, of_methods, read_rows, summary_row, totals_of
from draftsmith.eval.meta import RESULTS, hardware
from draftsmith.eval.tables import markdown
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import write_json, write_text
from draftsmith.modules.pretrained.provenance import git_commit, package_versions
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import check_range

HEADS = ("base", "eagle1", "medusa", "hydra")  # EAGLE-3 is recipes.py's base
TREE = "benchmarks/papers/drafters/medusa-63.yaml"
METHODS = (
    *("pld", "lookahead", f"medusa-static:tree={TREE}", f"hydra-static:tree={TREE}"),
    *("eagle-static:tree=eagle-1", f"eagle-static:tree={TREE}", "eagle-tree", "eagle3-tree"),
)


@dataclass(frozen=True)
class HeadTableConfig:
    """Trains heads of every kind on the same data for the same CPU seconds, and measures all methods. An interrupted
    command continues when it is run again.

    Attributes:
        output: Directory that receives heads/ (of recipes.py), bench/ and table1.md and .json.
        domain: edits, whose answers copy from their prompts, or prose.
        cpu_seconds: That a head is trained for: its steps alone, from stored features.
        seeds: Trainings of each kind: 0, 1, ...
        methods: What is measured beside ar, separated by commas.
        answers: Of the target, that heads are trained on.
        limit: Test prompts.
        max_new_tokens: Longest answer that is measured.
    """

    output: Path
    domain: Literal["edits", "prose"] = "edits"
    cpu_seconds: float = 120.0
    seeds: int = 3
    methods: str = ",".join(METHODS)
    answers: int = 960
    limit: int = 40
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("seeds", "answers", "limit", "max_new_tokens"):
            check_range(name, getattr(self, name), 1)

    @property
    def training(self) -> RecipesConfig:
        named = {name: getattr(self, name) for name in ("domain", "cpu_seconds", "seeds", "answers", "limit")}
        return RecipesConfig(self.output / "heads", recipes=",".join(HEADS), **named)


@sole_writer()
def run(config: HeadTableConfig) -> Path:
    """Train and measure what is missing, write the tables; return table1.json."""
    recipes.run(config.training)
    benches = [measured(config, seed) for seed in range(config.seeds)]
    rows = {mode: pooled([of_methods(own, value) for own in benches]) for mode, value in TEMPERATURES.items()}
    path = config.output / "table1.json"
    about = {"settings": resolved(config), "hardware": hardware("cpu"), "packages": package_versions()}
    write_json(path, {"meta": {**about, "git_commit": git_commit()}, "rows": rows})
    text = "\n".join(markdown(table_of(mode, own, config)) for mode, own in rows.items())
    write_text(path.with_suffix(".md"), text)
    print_text(f"{text}\nWritten to {path.with_suffix('.md')}")
    return path


def measured(config: HeadTableConfig, seed: int) -> list[Row]:
    """Return the rows of a bench with the heads of one seed; measure them if settings differ."""
    directory = config.output / "bench" / str(seed)
    heads = [str(config.training.run_directory(name, seed) / "last") for name in HEADS]
    methods = f"{BASELINE},{config.methods}"
    decided = {"draft": heads, "methods": methods, "limit": config.limit, "max_new_tokens": config.max_new_tokens}
    if settings_of(directory / RESULTS, decided) != decided:
        print_text(f"bench, seed {seed}")
        bench(config.training.source, directory, **(decided | {"draft": ",".join(heads), "seed": seed}))
    return read_rows(directory)


def settings_of(results: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return these settings of a finished bench; empty if there is none."""
    if not results.exists():
        return {}
    settings = read_object(results, {"meta": dict}, "Delete it, and it is measured again.")["meta"]["settings"]
    return {name: settings.get(name) for name in names}


def pooled(seeds: Sequence[Mapping[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """Pool each method over all seeds, as ratios of sums; a prompt is resampled with its answers of all seeds.

    seeds: of each, method -> its rows in one order of prompts.
    """
    found = []
    for method in seeds[0]:
        rows, baseline = ([row for own in seeds for row in own[name]] for name in (method, BASELINE))
        greedy = all(row["temperature"] == 0 for row in rows)
        taus = [totals_of(own[method]).tau for own in seeds]
        found.append({"method": method, **summary_row(rows, baseline, "cpu", 0, greedy), "taus": taus})
    return found


def table_of(mode: str, rows: Sequence[Mapping[str, Any]], config: HeadTableConfig) -> Table:
    columns = [
        *(Column("method", "method"), Column("tau", "tau", ".2f"), Column("tau_ci", "95 % CI")),
        *(Column("by_seed", "by seed"), Column("speedup", "speed-up", ".2fx"), Column("speedup_ci", "95 % CI")),
        Column("equal", "= ar"),
    ]
    shown = [
        {
            **row,
            "tau_ci": format_interval(row["tau_ci95"]),
            "speedup_ci": format_interval(row["speedup_ci95"]),
            "by_seed": " ".join(f"{tau:.2f}" for tau in row["taus"]),
            "equal": {None: "", True: "yes", False: f"no ({row['num_differing']})"}[row["matches_ar"]],
        }
        for row in rows
    ]
    note = (
        f"{config.domain}, {config.cpu_seconds:g} CPU seconds a head, {config.answers} answers, {config.seeds} seeds, "
    )
    note += f"{config.limit} test prompts, answers of up to {config.max_new_tokens} tokens."
    return Table(mode, mode.capitalize(), columns, shown, note)


if __name__ == "__main__":
    sys.exit(main_of(HeadTableConfig, run))
