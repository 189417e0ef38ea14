"""Compare recipes of draft heads on equal data and compute: `python benchmarks/recipes.py --output DIR`.

One setting is changed at a time (README.md). All heads learn from the same answers of the target for the same CPU
seconds: the cost of a step is measured first and steps are counted by it, so that the load of the machine decides
nothing and a run can be repeated. Heads are measured by `draftsmith eval bench`, with held-out prompts and chains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from draftsmith.benchmarks.measured import describe_run, write_tables
from draftsmith.benchmarks.papers.drafters import FOLDER, register
from draftsmith.data.console import Column, Table, format_interval, print_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.results import (
    BASELINE,
    NUM_RESAMPLES,
    Floats,
    MeasuredResamples,
    Row,
    of_methods,
    read_rows,
    totals_of,
)
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError, check_range

STEPS = "steps.json"
K, TEMPERATURES = 5, {"greedy": 0.0, "T=1": 1.0}
WARM_UP, TIMED = 2, 12  # steps of a training whose costs are measured
SeedRows = Sequence[Sequence[Row]]  # a row per test prompt for every seed, in one order
BASE = "base"
# The settings that a recipe changes, by the size of the target.
CONFIGS = {"embedded": "{}-embedded", "smollm2-135m": "smollm2-135m-{}"}
# Of a kind of head, the method that drafts chains.
CHAINS = {kind: f"{kind}:k={K}" for kind in ("eagle", "eagle3", "mtp", "dflash", "dspark")}
# Drafters of the papers, registered as a user's own.
PAPERS = ("medusa", "hydra")
CHAINS |= {kind: kind for kind in PAPERS}
EDITS = "add_docstring,add_type_hints,remove_docstring,remove_type_hints,rename,sort_imports,wrap_in_try"


@dataclass(frozen=True)
class Domain:
    """A target and its prompts. tasks: None is all."""

    target: str
    prompts: str
    tasks: str | None = None


DOMAINS = {
    "edits": Domain("embedded:target", "embedded:prompts", EDITS),
    "prose": Domain("embedded:prose/target", "embedded:prose/prompts"),
}


@dataclass(frozen=True)
class Recipe:
    """Changes to a kind's config (CONFIGS). other_data: train on `other_answers`."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "eagle3"
    other_data: bool = False

    @property
    def words(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in self.settings.items()]

    def text(self, answers: int) -> str:
        parts = [self.kind] if self.kind != "eagle3" else []
        parts += [f"{answers:,} answers"] if self.other_data else []
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.settings.items())])


RECIPES = {
    BASE: Recipe(),
    "eagle1": Recipe(kind="eagle"),
    **{f"version-{version}": Recipe({"version": version}) for version in ("3", "3-norm", "3.1")},
    "ttt-steps-1": Recipe({"ttt_steps": 1}),
    "ttt-steps-7": Recipe({"ttt_steps": 7}),
    "mask-previous": Recipe({"token_mask": "previous"}),
    "vocab512-keep": Recipe({"draft_vocab": 512, "unknown": "keep"}),
    "normalizer-sequence": Recipe({"normalizer": "sequence"}),
    "train-lm-head": Recipe({"train_lm_head": True}),
    "decay-1.0": Recipe({"ttt_step_decay": 1.0}),
    "adamw": Recipe({"optimizer": "adamw", "lr": 2e-3}),
    "other-data": Recipe(other_data=True),
    "medusa": Recipe({"lm_head": "own"}, kind="medusa"),  # as published, Hydra's too
    "hydra": Recipe({"lm_head": "own"}, kind="hydra"),
    "mtp": Recipe(kind="mtp"),  # of a target whose family has such modules
    "dflash-1": Recipe({"num_layers": 1, "block": K}, kind="dflash"),
    **{f"dspark-{n}": Recipe({"num_layers": n, "block": K}, kind="dspark") for n in (1, 2)},
}
# Settings that change nothing of what a step computes.
FREE = {"token_mask", "normalizer", "ttt_step_decay"}


def costs_like(name: str) -> str:
    """Return the first recipe whose steps cost the same, so that a pair gets the same number of steps."""

    def costly(recipe: Recipe) -> tuple[Any, ...]:
        return recipe.kind, {key: value for key, value in recipe.settings.items() if key not in FREE}

    return next(other for other, recipe in RECIPES.items() if costly(recipe) == costly(RECIPES[name]))


@dataclass(frozen=True)
class RecipesConfig:
    """Trains draft heads by several recipes on the same data for the same CPU seconds, and measures their drafts. A
    command that was interrupted goes on when it is given again.

    Attributes:
        output: Directory that receives data/, runs/, steps.json, and recipes.md and .json.
        domain: edits, whose answers copy from their prompts, or prose.
        target: Another target than the domain's.
        prompts: Other prompts, with splits train and test.
        responses: Answers of the target to train on, that `data responses` wrote; made from the prompts otherwise.
        configs: What the recipes change: configs/train/KIND-embedded.yaml or configs/recipes/smollm2-135m-KIND.yaml.
        dtype: Of the target, when it reads answers and when it decodes.
        cpu_seconds: That a head is trained for: its steps alone, from stored features; not start and validation.
        recipes: Which ones, separated by commas; all of EAGLE-3 and EAGLE-1 where it is not given.
        seeds: Trainings of each: 0, 1, ...
        answers: Of the target, that heads are trained on.
        other_answers: The same of the recipes with other data: more or fewer, as far as there are so many prompts.
        limit: Test prompts.
        max_new_tokens: Longest answer, in training and test.
    """

    output: Path
    domain: Literal["edits", "prose"] = "edits"
    target: str | None = None
    prompts: str | None = None
    responses: Path | None = None
    configs: Literal["embedded", "smollm2-135m"] = "embedded"
    dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_seconds: float = 80.0
    recipes: str = ",".join(name for name, recipe in RECIPES.items() if recipe.kind in ("eagle", "eagle3"))
    seeds: int = 3
    answers: int = 960
    other_answers: int = 3000
    limit: int = 48
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("seeds", "answers", "other_answers", "limit", "max_new_tokens"):
            check_range(name, getattr(self, name), 1)
        if not 0 < self.cpu_seconds < float("inf"):
            raise InputError("cpu_seconds", self.cpu_seconds, "a positive number", "Change it.")
        if unknown := sorted(set(self.names) - RECIPES.keys()):
            raise InputError("recipes", ", ".join(unknown), f"some of {', '.join(RECIPES)}", "Change it.")
        if BASE not in self.names:
            raise InputError("recipes", self.recipes, f"{BASE} among them: the others are compared with it", "Add it.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.recipes.split(",")]

    @property
    def source(self) -> Domain:
        own = DOMAINS[self.domain]
        prompts, tasks = (self.prompts, None) if self.prompts else (own.prompts, own.tasks)
        return Domain(self.target or own.target, prompts, tasks)

    def run_directory(self, name: str, seed: int) -> Path:
        return self.output / "runs" / f"{name}-{seed}"

    def bench_directory(self, name: str, seed: int) -> Path:
        return self.output / "benches" / f"{name}-{seed}"

    def answers_of(self, recipe: Recipe) -> int:
        return self.other_answers if recipe.other_data else self.answers

    def features(self, recipe: Recipe) -> Path:
        return self.output / "data" / f"{recipe.kind}-{self.answers_of(recipe)}"

    def training(self, name: str) -> list[str]:
        """Return the options of `draftsmith train KIND` without steps, seed and output."""
        recipe = RECIPES[name]
        data = ["--data", str(self.features(recipe)), "--target", self.source.target]
        rest = ["--val-share", "0.02", "--tau-prompts", "0", "--loggers", "csv", "--keep", "1", "--num-threads", "1"]
        config = (
            str(FOLDER / f"{self.configs}.yaml") if recipe.kind in PAPERS else CONFIGS[self.configs].format(recipe.kind)
        )
        return ["--config", config, *data, *rest, *recipe.words]


@sole_writer()
def run(config: RecipesConfig) -> Path:
    """Make the data, measure the steps, train and decode what is missing, write the tables; return recipes.json."""
    register()
    make_data(config)
    costs = step_costs(config)
    steps = {name: max(1, round(config.cpu_seconds / costs[costs_like(name)])) for name in config.names}
    # Seed by seed, so that every recipe has a result soon.
    todo = [(name, seed) for seed in range(config.seeds) for name in steps]
    for number, (name, seed) in enumerate(todo, start=1):
        print_text(f"{number}/{len(todo)} {trained(config, name, seed, steps[name])}")
    return write_report(config, steps)


def python(*words: str) -> None:
    """Run Python on one thread. Raises InputError with the end of its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        found = f"exit code {done.returncode} of {' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}"
        raise InputError("recipes", found, "0", "Give the command again: what is done stays.")


def make_data(config: RecipesConfig) -> None:
    """Make the target's answers and the features of each kind of head."""
    own, root = config.source, config.output / "data"
    learned = [RECIPES[name] for name in (*config.names, *map(costs_like, config.names))]
    most = max(map(config.answers_of, learned))
    rows = ["--split", "train", "--limit", str(most), *(["--tasks", own.tasks] if own.tasks else [])]
    answering = ["--temperature", "0", "--max-new-tokens", str(config.max_new_tokens)]
    prompts, responses = root / "prompts", config.responses or root / "responses"
    stages = {}
    if config.responses is None:
        stages[prompts] = ["prompts", "--source", own.prompts, *rows]
        stages[responses] = ["responses", "--data", str(prompts), "--batch-size", "128", *answering]
    for recipe in learned:
        words = ["features", "--data", str(responses), "--limit", str(config.answers_of(recipe))]
        words += ["--drafter", recipe.kind]
        words += ["--dtype", config.dtype, "--num-threads", "1"]
        stages[config.features(recipe)] = words
    for directory, words in stages.items():
        python("-m", "draftsmith", "data", *words, "--target", own.target, "--output", str(directory))
        print_text(f"data: {directory}")


def step_costs(config: RecipesConfig) -> dict[str, float]:
    """Return the CPU seconds of a step of the first recipe of each cost; they are measured once."""
    path, costs = config.output / STEPS, dict[str, float]()
    if path.exists():
        costs = read_object(path, {"costs": {"*": float}}, "Delete it, and they are measured again.")["costs"]
    for name in map(costs_like, config.names):
        if name not in costs:
            costs[name] = step_cost(config, name)
            write_json(path, {"costs": costs, "meta": describe_run(config)})
    return costs


def step_cost(config: RecipesConfig, name: str) -> float:
    """Return the mean CPU seconds of a step, in a training of a few steps that has all of its phases."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-recipes-") as folder:
        record = Path(folder) / "record.json"
        steps = str(WARM_UP + TIMED)
        words = [*config.training(name), "--max-steps", steps, "--val-every", steps, "--output", f"{folder}/run"]
        python("-m", "draftsmith.benchmarks.peers.train_draftsmith", str(record), RECIPES[name].kind, *words)
        seconds: list[float] = json.loads(record.read_text())["seconds"]
        return fmean(seconds[WARM_UP:])


def trained(config: RecipesConfig, name: str, seed: int, steps: int) -> str:
    """Train and decode one run; commands that are finished do nothing."""
    directory, kind = config.run_directory(name, seed), RECIPES[name].kind
    rhythm = ["--max-steps", str(steps), "--val-every", str(steps), "--seed", str(seed)]
    python("-m", "draftsmith", "train", kind, *config.training(name), *rhythm, "--output", str(directory))
    named = {key: getattr(config, key) for key in ("limit", "max_new_tokens", "dtype")}
    bench(config.source, config.bench_directory(name, seed), head=directory / "last", methods=CHAINS[kind], **named)
    taus = [f"{totals_of(rows).tau:.2f} {mode}" for mode, rows in by_mode(config, name, seed).items()]
    return f"{name}, seed {seed}: {steps} steps, tau {', '.join(taus)}"


def bench(own: Domain, output: Path, **options: Any) -> None:
    """Measure methods on the test prompts, greedy and at T=1, on one thread."""
    options |= {"target": own.target, "data": own.prompts, "split": "test", "tasks": own.tasks, "turns": "last"}
    options |= {"temperature": ",".join(map(str, TEMPERATURES.values())), "repeats": 1, "output": output}
    named = [(name.replace("_", "-"), value) for name, value in options.items() if value is not None]
    python("-m", "draftsmith", "eval", "bench", *(word for name, value in named for word in (f"--{name}", str(value))))


def by_mode(config: RecipesConfig, name: str, seed: int) -> dict[str, list[Row]]:
    """Return the rows of a head's chains by mode."""
    rows = [row for row in read_rows(config.bench_directory(name, seed)) if row["method"] != BASELINE]
    return {mode: next(iter(of_methods(rows, value).values())) for mode, value in TEMPERATURES.items()}


def results(config: RecipesConfig, steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the numbers by mode of each recipe, compared to the base."""
    modes = {name: [by_mode(config, name, seed) for seed in range(config.seeds)] for name in steps}
    rows = []
    for name, seeds in modes.items():
        settings = RECIPES[name].text(config.other_answers)
        row: dict[str, Any] = {"recipe": name, "settings": settings, "steps": steps[name]}
        for mode in TEMPERATURES:
            row[mode] = compared([own[mode] for own in seeds], [own[mode] for own in modes[BASE]])
        rows.append(row)
    return rows


class SeedResamples:
    """Bootstrap resamples of test prompts and seeds, shared by all that is compared."""

    def __init__(self, base: SeedRows):
        self.prompts = MeasuredResamples(base[0], 0)
        self._seeds = np.random.default_rng(0).integers(len(base), size=(len(base), NUM_RESAMPLES))

    def tau(self, runs: SeedRows) -> Floats:
        """Return the mean over drawn seeds of tau over drawn prompts [NUM_RESAMPLES]."""
        taus = np.stack([self.prompts.tau(rows) for rows in runs])
        return np.take_along_axis(taus, self._seeds, 0).mean(0)


def acceptance(runs: SeedRows) -> list[float]:
    """Return how often the first, second, ... token of a draft is accepted where those before it were."""
    rounds = [step for rows in runs for row in rows for step in row["rounds"]]
    reached = [[step for step in rounds if step["num_drafted"] > d and step["num_accepted"] >= d] for d in range(K)]
    return [sum(step["num_accepted"] > d for step in own) / max(1, len(own)) for d, own in enumerate(reached)]


def compared(runs: SeedRows, base: SeedRows) -> dict[str, Any]:
    """Return tau, and its ratio to the base's with the same seeds, with 95 % intervals."""
    taus, drawn = [[totals_of(rows).tau for rows in own] for own in (runs, base)], SeedResamples(base)
    (tau, other), (own_drawn, base_drawn) = map(np.mean, taus), map(drawn.tau, (runs, base))
    found: dict[str, Any] = {"tau": float(tau), "ratio": float(tau / other), "seeds": taus[0]}
    for name, values in {"tau": own_drawn, "ratio": own_drawn / base_drawn}.items():
        found[f"{name}_ci95"] = drawn.prompts.interval(values)
    return {**found, "acceptance": acceptance(runs)}


def tables(found: Sequence[Mapping[str, Any]], title: str) -> list[Table]:
    """Build the tables. found: name, settings and steps of each recipe, and `compared` for each mode."""
    first = [Column("recipe", "recipe"), Column("settings", "differs in"), Column("steps", "steps", "d")]
    taus, places = [*first], first[:1]
    rows = [{column.key: own[column.key] for column in first} for own in found]
    for mode in TEMPERATURES:
        for key, heading, form in (("tau", "tau", ".2f"), ("ratio", "to base", ".2fx")):
            taus += [Column(f"{mode} {key}", f"{mode}: {heading}", form), Column(f"{mode} {key}_ci95", f"{mode}: 95 %")]
        places += [Column(f"{mode} {d + 1}", f"{mode}: {d + 1}", ".2f") for d in range(K)]
        for row, part in zip(rows, (own[mode] for own in found), strict=True):
            row |= {f"{mode} {name}": part[name] for name in ("tau", "ratio")}
            row |= {f"{mode} {name}_ci95": format_interval(part[f"{name}_ci95"]) for name in ("tau", "ratio")}
            row |= {f"{mode} {d + 1}": value for d, value in enumerate(part["acceptance"])}
    return [Table("tau", f"{title}: tau", taus, rows), Table("places", f"{title}: accepted by place", places, rows)]


def write_report(config: RecipesConfig, steps: Mapping[str, int]) -> Path:
    found, path = results(config, steps), config.output / "recipes.json"
    drafts = f"{config.limit} test prompts, answers of up to {config.max_new_tokens} tokens, chains of {K}"
    what = config.domain if config.target is None else Path(config.target).stem
    shown = tables(found, f"{what}, {config.cpu_seconds:g} CPU seconds, {config.seeds} seeds, {drafts}")
    return write_tables(config, path, "recipes", found, shown)


if __name__ == "__main__":
    sys.exit(main_of(RecipesConfig, run))
