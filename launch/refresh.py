"""`draftsmith refresh`: measure, train on, measure again. Every step is the command that would run it alone, so that a
larger training can be started by hand (`draftsmith launch ... -- train ...`) and is found here."""

from __future__ import annotations

import time
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.text import Text

from draftsmith.launch.commands import configure
from draftsmith.launch.errors import did_you_mean
from draftsmith.launch.steps import STARTED, PipelineStep, execute, remember_settings
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.eval.refresh import RefreshConfig

REFRESHED, COST, RECIPE = "refresh.json", "cost.json", "recipe.yaml"
# Settings of the head's own training that belong to its old target, its data or its length.
NOT_KEPT = ("target", "init", "seed", "features", "feature_dtype", "model_dtype", "epochs", "max_steps")


def run(config: RefreshConfig) -> Path:
    """Everything that is missing, then output/refresh.json.

    Raises:
        InputError: the head does not fit the target, the data is of another target, or there is nothing to measure on.
    """
    from draftsmith.data.store.writer import writing_alone

    with writing_alone(config.output):
        return make(config)


def make(config: RefreshConfig) -> Path:
    """Refresh, alone in its output."""
    from draftsmith.data.store.files import write_json
    from draftsmith.data.store.reading import read_object

    done = config.output / REFRESHED
    if (config.output / STARTED).exists():
        remember_settings(config)
    if done.exists():
        report(read_object(done, {"modes": [dict], "verdict": str, "recommended": str}), config)
        return config.output
    method = chain_of(config)
    before, training, after = steps(config, method)
    seen = prepare(config, training)
    execute(before, partly=True)
    remember_settings(config)  # now that nothing of them was refused
    train(training, config.output / COST)
    execute(after, partly=True)
    found = outcome(config, method, seen)
    write_json(done, found)
    report(found, config)
    return config.output


def chain_of(config: RefreshConfig) -> str:
    """The method that drafts chains with the head; of a kind that has none, the one that its card names."""
    from draftsmith.data.heads.directory import drafter_kind
    from draftsmith.modules.drafters import head_class
    from draftsmith.modules.drafters.chains import FixedK
    from draftsmith.modules.drafters.methods import known_methods

    kind = drafter_kind(config.head)
    chains = [name for name, own in known_methods().items() if issubclass(own, FixedK) and kind in own.uses]
    return f"{chains[0]}:k={config.k}" if chains else head_class(kind).card({}).method


def steps(config: RefreshConfig, method: str) -> tuple[PipelineStep, PipelineStep, PipelineStep]:
    """Bench, training, bench."""
    from draftsmith.data.heads.directory import drafter_kind

    root, kind = config.output, drafter_kind(config.head)
    common = {"target": config.target, "engine": config.engine, "seed": config.seed, "num_threads": config.num_threads}
    common |= {"trust_remote_code": config.trust_remote_code or None}
    names = "prompts split keep_tasks limit temperatures max_new_tokens dtype device"
    asked = {name: getattr(config, name) for name in names.split()} | {"ignore_eos": config.ignore_eos or None}
    asked |= {"packed": config.packed, "methods": method, "repeats": 1}

    def bench(title: str, name: str, head: Path) -> PipelineStep:
        done = root / name / "results.json"
        return PipelineStep.of(title, "eval bench", done, draft=head, **common, **asked, output=root / name)

    training = PipelineStep.of(
        "Training on", f"train {kind}", root / "training" / "training.json", config=root / RECIPE, init=config.head,
        data=config.data, **common, model_dtype="auto" if config.dtype == "float16" else config.dtype,
        accelerator="cpu" if config.device == "cpu" else "gpu", resume=True, group=root.name, output=root / "training",
    )  # fmt: skip
    return (
        bench("The head as it is", "before", root / "old"),
        training,
        bench("The head after it", "after", root / "training" / "best"),
    )


def prepare(config: RefreshConfig, training: PipelineStep) -> set[int]:
    """Write output/recipe.yaml and output/old, once everything that is asked for fits. Numbers of the prompts that are
    not held out of the data.

    Raises:
        InputError: as of `run`. UsageError: the training has no such setting.
    """
    from draftsmith.data.heads.moved import check_fits, move_head
    from draftsmith.data.models.loading import load_lm
    from draftsmith.data.store.files import make_directory, write_text
    from draftsmith.eval.bench.prompts import read_questions
    from draftsmith.eval.refresh import also_in
    from draftsmith.train.drafter import open_data, shape_for

    kind, name = training.argv[1], " ".join(training.argv[:2])
    recipe = yaml.safe_dump(recipe_of(config, kind), sort_keys=False)
    target = load_lm(config.target, **config.loading)
    check_fits(config.head, target, config.target)
    make_directory(config.output)
    write_text(config.output / RECIPE, f"# What {config.output} is trained with.\n{recipe}")
    settings: Any = configure(name, training.argv[2:])[1]
    layers = settings.drafter.learns_from(shape_for(settings, target), target.info.num_layers)
    open_data(config.data, settings, target, layers)
    sources = [("", config.prompts)]
    questions = read_questions(sources, config.target, config.split, config.keep_tasks, config.limit, "all")
    seen = also_in(config.data, [prompt for part in questions for prompt in part])
    if not (config.output / "old" / "manifest.json").exists():
        move_head(config.head, target, config.target, config.output / "old")
    return seen


def recipe_of(config: RefreshConfig, kind: str) -> dict[str, Any]:
    """Settings of the training: those of the head's own, with the recipe's in their places.

    Raises:
        InputError: the recipe holds what no training of a drafter has.
    """
    from draftsmith.data.store.reading import read_object
    from draftsmith.launch.arguments import read_yaml
    from draftsmith.modules.drafters import head_class, learned
    from draftsmith.train.config import drafter_config

    file = config.recipe or Path(str(files("draftsmith.configs") / "refresh.yaml"))
    recipe, known = read_yaml(file), {spec.name: spec for spec in fields(drafter_config(kind))}
    everywhere = {spec.name for name in learned() for spec in fields(drafter_config(name))} | {"lr_share"}
    for name in recipe.keys() - everywhere:
        hint = did_you_mean(name, everywhere).strip() or "Leave it out."
        raise InputError(str(file), name, f"settings of `train {kind}`, and lr_share", hint)
    share = recipe.pop("lr_share", 1.0)
    if not isinstance(share, int | float) or not share > 0:
        raise InputError(str(file), f"lr_share {share!r}", "a number above 0", "Correct it.")
    made = read_object(config.head / "manifest.json", {"config?": (dict, None)}).get("config") or {}
    decisive = {name for name, spec in known.items() if not spec.metadata.get("volatile")}
    own = {name: value for name, value in made.items() if name in decisive and name not in NOT_KEPT}
    if made.get("init", "random") in head_class(kind).starts:  # else it was trained on already, at a rate for that
        own["lr"] = float(own.get("lr", known["lr"].default)) * share
    chosen = {name: value for name, value in recipe.items() if name in known}
    return own | chosen | ({"max_steps": config.max_steps} if config.max_steps else {})


def train(step: PipelineStep, file: Path) -> None:
    """Train, or go on, and add up in `file` what all starts took; one that is killed outright leaves nothing of its
    own."""
    from draftsmith.data.store.files import write_json

    if step.done.exists():  # also where another command has trained it, whose cost nobody knows
        return execute(step)
    spent = read_cost(file)
    wall, cpu = time.monotonic(), time.process_time()
    try:
        execute(step)
    finally:
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        finished = step.done.exists()
        write_json(file, {"wall_s": spent["wall_s"] + wall, "cpu_s": spent["cpu_s"] + cpu, "finished": finished})


def read_cost(file: Path) -> dict[str, Any]:
    """What all starts took, and whether they came to the end of the training."""
    from draftsmith.data.store.reading import read_object

    nothing = {"wall_s": 0.0, "cpu_s": 0.0, "finished": False}
    return read_object(file, {"wall_s": float, "cpu_s": float, "finished": bool}) if file.exists() else nothing


def outcome(config: RefreshConfig, method: str, seen: set[int]) -> dict[str, Any]:
    """What refresh.json holds."""
    from draftsmith.data.heads.measured import WEIGHTS
    from draftsmith.data.store.manifest import command_line, file_sha256, git_commit, package_versions, resolved
    from draftsmith.data.store.reading import read_object
    from draftsmith.eval.bench.compare import open_bench
    from draftsmith.eval.refresh import gains, overall, paid_after

    before, after = (open_bench(str(config.output / name)) for name in ("before", "after"))
    modes = gains(before, after, method, config, seen)
    verdict = overall([row["verdict"] for row in modes])
    best = config.output / "training" / "best"
    steps = read_object(config.output / "training" / "training.json", {"steps": int})["steps"]
    made = read_object(best / "manifest.json", {"samples": dict, "config": dict})
    samples, settings, spent = made["samples"]["training"], made["config"], read_cost(config.output / COST)
    batch = settings["tokens_per_batch"] or settings["batch_size"] * samples["tokens"] / samples["samples"]
    known = {name: spent[name] for name in ("wall_s", "cpu_s") if spent["finished"]}
    seconds = known.get(f"{before.meta['clock']}_s")
    return {
        "schema_version": 1,
        "kind": "refresh",
        "command": command_line("refresh", config),
        "settings": resolved(config),
        "head": {"path": str(config.head), "sha256": file_sha256(config.output / "old" / WEIGHTS)},
        "target": before.meta["target"],
        "method": method,
        "modes": modes,
        "verdict": verdict,
        "recommended": str(best if verdict == "worth it" else config.output / "old"),
        "prompts_left_out": len(seen),
        "cost": {"steps": steps, "tokens": round(steps * batch), **known, "device": config.device},
        "paid_after_tokens": [
            paid_after(row, seconds) if seconds and row["verdict"] == "worth it" else None for row in modes
        ],
        "training": settings,
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def report(found: dict[str, Any], config: RefreshConfig) -> None:
    """Tables, the cost, the verdict and which head to take."""
    from draftsmith.data.screen import say, show
    from draftsmith.eval.bench.tables import mode
    from draftsmith.eval.refresh import tables_of, verdict_line

    for table in tables_of(found["modes"], found["method"]):
        show(table)
    if found["prompts_left_out"]:
        say(f"{found['prompts_left_out']} prompts are answered in the data too, and do not count.")
    cost, took = found["cost"], "an unknown time, as another command trained it"
    if "cpu_s" in cost:
        took = f"{cost['cpu_s']:.0f} CPU seconds, {cost['wall_s']:.0f} s on {cost['device']}"
    say(f"Cost: {cost['steps']:,} steps, about {cost['tokens']:,} tokens, {took}.")
    for row, tokens in zip(found["modes"], found["paid_after_tokens"], strict=True):
        if tokens is not None:
            say(f"Paid back after about {tokens:,.0f} decoded tokens, {mode(row['temperature'])}.")
    say(Text(verdict_line(found["verdict"], found["modes"], config.worth), "bold"))
    say(f"Recommended: {found['recommended']}. Everything: {config.output / REFRESHED}")
