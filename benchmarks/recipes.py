"""`python benchmarks/recipes.py`: recipes of draft heads on equal data and compute (docs/recipes.md).

One setting is changed at a time. All heads learn from the same answers of the target, for the same CPU seconds: what a
step costs is measured first (recipe_cost.py) and the steps are counted by it, so that whatever else runs on the machine
decides nothing, and a run can be repeated. Heads are measured by decoding held-out prompts in chains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from draftsmith.benchmarks.recipe_cost import MeasuredTraining, StepCost, measured_costs, read_costs
from draftsmith.data.models.loading import load_lm
from draftsmith.data.progress import say
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.manifest import git_commit, package_versions, resolved
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import load_models
from draftsmith.eval.bench.prompts import longest_sequence, read_questions
from draftsmith.eval.bench.results import (
    PER_PROMPT,
    Row,
    hardware,
    of_methods,
    read_rows,
    row_of,
    totals_of,
    write_rows,
)
from draftsmith.eval.bench.runner import make_runners
from draftsmith.eval.bench.summary import MeasuredResamples
from draftsmith.eval.bootstrap import NUM_RESAMPLES, Floats
from draftsmith.eval.report.tables import Column, Table, comma_separated, interval, markdown, on_screen
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.types import InputError, SamplingParams, at_least

RESULT, STEPS, REPORT = "result.json", "steps.json", "recipes"
BASE = "base"
K, TEMPERATURES = 5, {"greedy": 0.0, "T=1": 1.0}
CONFIGS = {"eagle": "eagle-small", "eagle3": "eagle3-small"}
EDITS = "add_docstring,add_type_hints,remove_docstring,remove_type_hints,rename,sort_imports,wrap_in_try"


@dataclass(frozen=True)
class Domain:
    """A target, prompts with their splits, and which of their tasks (all where there are none)."""

    target: str
    prompts: str
    tasks: str | None = None


DOMAINS = {
    "edits": Domain("embedded:target", "embedded:prompts", EDITS),
    "prose": Domain("embedded:prose-target", "embedded:prose-prompts"),
}


@dataclass(frozen=True)
class Recipe:
    """What differs from configs/train/eagle3-small.yaml, or eagle-small.yaml; more: trained on all answers."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "eagle3"
    more: bool = False

    @property
    def words(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in self.settings.items()]

    def text(self, answers: int) -> str:
        parts = ["EAGLE-1, unroll 2"] if self.kind == "eagle" else []
        parts += [f"{answers:,} answers"] if self.more else []
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.settings.items())])


RECIPES = {
    BASE: Recipe(),
    "eagle1": Recipe(kind="eagle"),
    "passes-1": Recipe({"passes": 1}),
    "passes-7": Recipe({"passes": 7}),
    "mask-previous": Recipe({"token_mask": "previous"}),
    "mask-predicted": Recipe({"token_mask": "predicted"}),
    "vocab512-drop": Recipe({"draft_vocab": 512, "unknown": "drop"}),
    "vocab512-keep": Recipe({"draft_vocab": 512, "unknown": "keep"}),
    "normalizer-sequence": Recipe({"normalizer": "sequence"}),
    "train-lm-head": Recipe({"train_lm_head": True}),
    "decay-0.9": Recipe({"pass_decay": 0.9}),
    "decay-1.0": Recipe({"pass_decay": 1.0}),
    "lk-hybrid": Recipe({"loss": "lk-hybrid"}),
    "lk": Recipe({"loss": "lk"}),
    "adamw": Recipe({"optimizer": "adamw", "lr": 2e-3}),
    "version-3.1": Recipe({"version": "3.1"}),
    "more-data": Recipe(more=True),
    "eagle1-more-data": Recipe(kind="eagle", more=True),
}
# Settings that change nothing of what a step computes; `unknown` only which tokens count.
FREE = {"token_mask", "unknown", "normalizer", "pass_decay"}


def costs_like(name: str) -> str:
    """The first recipe whose steps cost the same: the same steps make a pair that differs in nothing else."""

    def costly(recipe: Recipe) -> tuple[Any, ...]:
        return recipe.kind, {key: value for key, value in recipe.settings.items() if key not in FREE}

    return next(other for other, recipe in RECIPES.items() if costly(recipe) == costly(RECIPES[name]))


@dataclass(frozen=True)
class RecipesConfig:
    """Trains draft heads by several recipes on the same data for the same CPU seconds, and measures their drafts. A
    command that was interrupted goes on when it is given again.

    Attributes:
        output: Directory that receives data/, runs/, steps.json, and recipes.md, .csv and .json.
        domain: edits, whose answers copy from their prompts, or prose.
        target: Another target than the domain's.
        prompts: Other prompts, with splits train and test. All of their tasks are taken unless --tasks is given.
        tasks: Only these tasks, separated by commas.
        cpu_seconds: That a head is trained for: its steps alone, from stored features; not start and validation.
        recipes: Which ones, separated by commas; all where it is not given.
        seeds: Trainings of each: 0, 1, ...
        jobs: Trainings at a time, each on one thread.
        data: Directory of the target's answers and features, which several outputs may share. Default: output/data.
        steps_of: The steps.json of another output, whose measured costs are taken.
        answers: Of the target, that heads are trained on.
        more_answers: The same of the recipes with more data, as far as there are so many prompts.
        answer_temperature: At which the target answers the prompts that are trained on.
        limit: Test prompts.
        max_new_tokens: Longest answer, in training and test.
        batches: Batches that are measured for the cost of steps.
        rounds: Runs of each of them.
        report: Only write the tables of what is there.
    """

    output: Path
    domain: Literal["edits", "prose"] = "edits"
    target: str | None = None
    prompts: str | None = None
    tasks: str | None = None
    cpu_seconds: float = 80.0
    recipes: str = ",".join(RECIPES)
    seeds: int = 3
    jobs: int = 1
    data: Path | None = None
    steps_of: Path | None = None
    answers: int = 960
    more_answers: int = 3000
    answer_temperature: float = 0.0
    limit: int = 48
    max_new_tokens: int = 256
    batches: int = 8
    rounds: int = 3
    report: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs", "answers", "limit", "max_new_tokens", "batches", "rounds"):
            at_least(name, getattr(self, name), 1)
        at_least("more_answers", self.more_answers, self.answers)
        if not 0 < self.cpu_seconds < float("inf"):
            raise InputError("cpu_seconds", self.cpu_seconds, "a positive number", "Change it.")
        if unknown := sorted(set(self.names) - RECIPES.keys()):
            raise InputError("recipes", ", ".join(unknown), f"some of {', '.join(RECIPES)}", "Change it.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.recipes.split(",")]

    @property
    def source(self) -> Domain:
        own = DOMAINS[self.domain]
        tasks = self.tasks if self.tasks or self.prompts else own.tasks
        return Domain(self.target or own.target, self.prompts or own.prompts, tasks)

    @property
    def data_directory(self) -> Path:
        return self.data or self.output / "data"

    def features(self, kind: str, more: bool) -> Path:
        return self.data_directory / f"{kind}-{self.more_answers if more else self.answers}"

    def training(self, name: str) -> list[str]:
        """Words of `draftsmith train KIND`, but for steps, seed and output."""
        recipe = RECIPES[name]
        data = ["--data", str(self.features(recipe.kind, recipe.more)), "--target", self.source.target]
        rest = ["--val-share", "0.02", "--tau-prompts", "0", "--track", "csv", "--num-threads", "1"]
        return ["--config", CONFIGS[recipe.kind], *data, *rest, *recipe.words]


@sole_writer()
def run(config: RecipesConfig) -> Path:
    """Make the data, measure the steps, train and decode what is not there yet, write the tables; returns
    recipes.json."""
    if not config.report:
        make_data(config)
    costs = step_costs(config)
    steps = {name: costs[costs_like(name)].steps(config.cpu_seconds) for name in config.names}
    if not config.report:
        train_all(config, steps)
    return write_report(config, steps)


def draftsmith(*words: str) -> float:
    """Run a command on one thread; its CPU seconds.

    Raises:
        InputError: it failed; with the end of what it said.
    """
    return python("-m", "draftsmith", *words)


def python(*words: str) -> float:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        found = f"exit code {process.returncode} of {' '.join(words)}: {said[-2000:]}"
        raise InputError("recipes", found, "0", "Give the command again: what is done stays.")
    return used.ru_utime + used.ru_stime


def make_data(config: RecipesConfig) -> None:
    """Answers of the target, and the states that each kind of head learns from."""
    own, root = config.source, config.data_directory
    rows = ["--split", "train", "--limit", str(config.more_answers), *(["--task", own.tasks] if own.tasks else [])]
    answering = ["--temperature", str(config.answer_temperature), "--max-new-tokens", str(config.max_new_tokens)]
    prompts, responses = root / "prompts", root / "responses"
    stages = {
        prompts: ["prompts", "--source", own.prompts, *rows],
        responses: ["responses", "--prompts", str(prompts), "--batch-size", "128", *answering],
    }
    for recipe in (RECIPES[name] for name in config.names):
        size = config.more_answers if recipe.more else config.answers
        words = ["features", "--responses", str(responses), "--limit", str(size), "--drafter", recipe.kind]
        stages[config.features(recipe.kind, recipe.more)] = words
    for directory, words in stages.items():
        draftsmith("data", *words, "--target", own.target, "--output", str(directory))
        say(f"data: {directory}")


def step_costs(config: RecipesConfig) -> dict[str, StepCost]:
    """Of the first recipe of each cost: measured once, and then read."""
    path = config.steps_of or config.output / STEPS
    names = list(dict.fromkeys(map(costs_like, config.names)))
    if config.steps_of or config.report or path.exists():
        return read_costs(path, names)
    torch.set_num_threads(1)
    like = {costs_like(name): name for name in reversed(config.names)}  # whose data is there
    trainings = {name: MeasuredTraining(RECIPES[name].kind, words_at(config, like[name])) for name in names}
    steps: dict[str, Callable[[float, str], object]] = {name: own.step for name, own in trainings.items()}
    after = {name: own.after for name, own in trainings.items()}
    costs = measured_costs(steps, after, config.batches, config.rounds)
    measured = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
    write_json(path, {"costs": measured, "hardware": hardware("cpu"), "packages": package_versions()})
    return costs


def words_at(config: RecipesConfig, name: str) -> list[str]:
    return [*config.training(name), "--max-steps", "1000", "--output", str(config.output / "none")]


def train_all(config: RecipesConfig, steps: Mapping[str, int]) -> None:
    """Seed by seed, so that there is something of every recipe soon."""
    with ThreadPoolExecutor(config.jobs) as pool:
        todo = [(name, seed) for seed in range(config.seeds) for name in steps]
        waiting = [pool.submit(trained, config, name, seed, steps[name]) for name, seed in todo]
        try:
            for number, done in enumerate(as_completed(waiting), start=1):
                say(f"{number}/{len(waiting)} {done.result()}")
        finally:
            pool.shutdown(cancel_futures=True)


def decided_by(config: RecipesConfig, name: str, steps: int) -> dict[str, Any]:
    """All that a run's numbers depend on."""
    own, recipe = config.source, RECIPES[name]
    named = {key: getattr(config, key) for key in ("answer_temperature", "limit", "max_new_tokens")}
    answers = config.more_answers if recipe.more else config.answers
    return {**dataclasses.asdict(own), **dataclasses.asdict(recipe), **named, "answers": answers, "steps": steps}


def finished(directory: Path, decided: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a whole run; None where there is none, or half of one.

    Raises:
        InputError: the run is of other settings.
    """
    if not (directory / RESULT).exists():
        return None
    found = read_object(directory / RESULT, {"decided_by": dict, "cpu_s": float}, "Delete it, and it is run again.")
    if found["decided_by"] != json.loads(json.dumps(decided)):
        there = f"{directory} with {json.dumps(found['decided_by'])}"
        raise InputError("output", there, json.dumps(decided), "Choose another output, or delete that run.")
    return found


def trained(config: RecipesConfig, name: str, seed: int, steps: int) -> str:
    """One run, if it is not there yet: train, decode, keep the head, its drafts and, last, the result."""
    directory, decided = config.output / "runs" / f"{name}-{seed}", decided_by(config, name, steps)
    if finished(directory, decided) is None:
        shutil.rmtree(directory, ignore_errors=True)
        rhythm = ["--max-steps", str(steps), "--val-every", str(steps), "--seed", str(seed)]
        kind = RECIPES[name].kind
        cpu_s = draftsmith("train", kind, *config.training(name), *rhythm, "--output", str(directory))
        own = dataclasses.asdict(config.source)
        python(__file__, "--decode", json.dumps([own, config.limit, config.max_new_tokens, kind, str(directory)]))
        for path in directory.iterdir():
            if path.is_dir() and path.name != "last":
                shutil.rmtree(path)
        write_json(directory / RESULT, {"decided_by": decided, "cpu_s": cpu_s})
    taus = [f"{totals_of(rows).tau:.2f} {mode}" for mode, rows in by_mode(directory).items()]
    return f"{name}, seed {seed}: {steps} steps, tau {', '.join(taus)}"


def decode(own: Domain, limit: int, max_new_tokens: int, kind: str, directory: Path) -> None:
    """Answer the test prompts with the head's drafts; writes the rows."""
    torch.set_num_threads(1)
    named = parse_methods(f"{kind}:k={K}")
    (prompts,) = read_questions([("", own.prompts)], own.target, "test", own.tasks, limit, "last")
    modes = [SamplingParams(temperature) for temperature in TEMPERATURES.values()]
    target = load_lm(own.target, packed=True)
    longest = longest_sequence(prompts, max_new_tokens, target.info.max_position)
    models = load_models(named, {kind: str(directory / "last")}, longest, modes[0], target)
    rows = [
        row_of(prompt, prompt.number, label, temperature, *runner([prompt.prompt_ids], max_new_tokens, [number]))
        for temperature, runners in make_runners(named, models, modes).items()
        for label, runner in runners.items()
        for number, prompt in enumerate(prompts)
    ]
    write_rows(directory / PER_PROMPT, rows)


def by_mode(directory: Path) -> dict[str, list[Row]]:
    """Greedy or T=1 -> a row for each test prompt, in their order."""
    rows = read_rows(directory)
    return {mode: next(iter(of_methods(rows, value).values())) for mode, value in TEMPERATURES.items()}


class Drawn:
    """Bootstrap resamples of prompts and of seeds, the same for all that is compared."""

    def __init__(self, rows: Sequence[Row], seeds: int):
        self.prompts = MeasuredResamples(rows, 0)
        self._seeds = np.random.default_rng(0).integers(seeds, size=(seeds, NUM_RESAMPLES))

    def tau(self, runs: Sequence[Sequence[Row]]) -> Floats:
        """[NUM_RESAMPLES]: mean over drawn seeds of tau over drawn prompts; runs: the rows of each seed."""
        taus = np.stack([self.prompts.tau(rows) for rows in runs])
        return np.take_along_axis(taus, self._seeds, 0).mean(0)

    def interval(self, values: Floats) -> list[float] | None:
        return self.prompts.interval(lambda: values)


def mean_tau(runs: Sequence[Sequence[Row]]) -> float:
    return float(np.mean([totals_of(rows).tau for rows in runs]))


def acceptance(runs: Sequence[Sequence[Row]]) -> list[float]:
    """How often the first, second, ... token of a draft is accepted where those before it were, over all seeds."""
    rounds = [step for rows in runs for row in rows for step in row["rounds"]]
    reached = [[step for step in rounds if step["num_drafted"] > d and step["num_accepted"] >= d] for d in range(K)]
    return [sum(step["num_accepted"] > d for step in own) / max(1, len(own)) for d, own in enumerate(reached)]


def compared(runs: Sequence[Sequence[Row]], base: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Tau, and its difference from and ratio to that of the base's runs with the same seeds; 95 % intervals."""
    drawn = Drawn(base[0], len(base))
    own, other = drawn.tau(runs), drawn.tau(base)
    tau, base_tau = mean_tau(runs), mean_tau(base)
    measured = {"tau": (tau, own), "difference": (tau - base_tau, own - other), "ratio": (tau / base_tau, own / other)}
    found: dict[str, Any] = {"seeds": [totals_of(rows).tau for rows in runs], "acceptance": acceptance(runs)}
    for name, (value, resampled) in measured.items():
        found |= {name: value, f"{name}_ci95": drawn.interval(resampled)}
    return found


def results(config: RecipesConfig, steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """A row for each recipe of which all seeds are there, and of the base; its numbers by mode."""
    runs: dict[str, tuple[list[float], dict[str, list[list[Row]]]]] = {}
    for name in dict.fromkeys([BASE, *steps]):
        places = [config.output / "runs" / f"{name}-{seed}" for seed in range(config.seeds)]
        done = [finished(place, decided_by(config, name, steps[name])) for place in places if name in steps]
        seconds = [own["cpu_s"] for own in done if own is not None]
        if len(seconds) == config.seeds:
            modes = [by_mode(place) for place in places]
            runs[name] = seconds, {mode: [own[mode] for own in modes] for mode in TEMPERATURES}
    if BASE not in runs:
        raise InputError(
            "recipes", f"no {config.seeds} seeds of {BASE}", "them: the others are compared with it", "Add it."
        )
    return [
        {
            "recipe": name,
            "settings": RECIPES[name].text(config.more_answers),
            "steps": steps[name],
            "cpu_s": float(np.mean(seconds)),
            **{mode: compared(own[mode], runs[BASE][1][mode]) for mode in TEMPERATURES},
        }
        for name, (seconds, own) in runs.items()
    ]


def tables(config: RecipesConfig, found: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tau and what it is to the base's; how its drafts are accepted, token by token."""
    first = [Column("recipe", "recipe"), Column("settings", "differs in")]
    taus, depths = [*first, Column("steps", "steps", "d"), Column("cpu_s", "CPU s", ".0f")], first[:1]
    rows = []
    for own in found:
        row = {key: own[key] for key in ("recipe", "settings", "steps", "cpu_s")}
        for mode in TEMPERATURES:
            part = own[mode]
            row |= {f"{mode} tau": part["tau"], f"{mode} ratio": part["ratio"]}
            row |= {f"{mode} {name}_ci95": interval(part[f"{name}_ci95"]) for name in ("tau", "ratio")}
            row |= {f"{mode} difference": part["difference"]}
            row |= {f"{mode} difference_ci95": interval(part["difference_ci95"], "+.2f", " ")}
            row |= {f"{mode} accepted {d + 1}": value for d, value in enumerate(part["acceptance"])}
        rows.append(row)
    for mode in TEMPERATURES:
        for key, title, form in (
            ("tau", "tau", ".2f"),
            ("difference", f"less {BASE}", "+.2f"),
            ("ratio", "ratio", ".2f"),
        ):
            taus += [Column(f"{mode} {key}", title, form, mode), Column(f"{mode} {key}_ci95", "95 %", "", mode)]
        depths += [Column(f"{mode} accepted {d}", str(d), ".2f", mode) for d in range(1, K + 1)]
    many = f"{config.seeds} seeds, {config.limit} test prompts of up to {config.max_new_tokens} tokens, chains of {K}"
    title = f"{config.domain}, {config.cpu_seconds:g} CPU seconds"
    about = f"CPU s: of the whole training, start and validation included; the steps alone are {config.cpu_seconds:g}."
    return [
        Table("tau", f"{title}: tokens a target call ({many})", taus, rows, about),
        Table("depth", f"{title}: acceptance of a draft's tokens where those before were accepted", depths, rows),
    ]


def write_report(config: RecipesConfig, steps: Mapping[str, int]) -> Path:
    found = results(config, steps)
    shown, path = tables(config, found), make_directory(config.output) / f"{REPORT}.json"
    for table in shown:
        Console(highlight=False).print(on_screen(table))
        write_text(config.output / f"{REPORT}-{table.name}.csv", comma_separated(table))
    write_text(config.output / f"{REPORT}.md", "\n".join(markdown(table) for table in shown))
    meta = {"settings": resolved(config), "hardware": hardware("cpu"), "packages": package_versions()}
    write_json(path, {"meta": {**meta, "git_commit": git_commit()}, "recipes": found})
    return path


if __name__ == "__main__":
    if sys.argv[1:2] == ["--decode"]:
        own, *sizes, kind, directory = json.loads(sys.argv[2])
        decode(Domain(**own), *sizes, kind, Path(directory))
    else:
        sys.exit(main_of(RecipesConfig, run))
