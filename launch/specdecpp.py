"""`draftsmith eval specdecpp`: SpecDec++'s experiments in one command, which makes the labels, trains the heads and
measures. Every stage is the command that would run it alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.launch.steps import PipelineStep, execute, remember_settings

if TYPE_CHECKING:
    from draftsmith.eval.studies.specdecpp.study import LoadedStudy, SpecDecPPConfig


def run(config: SpecDecPPConfig) -> Path:
    """Everything that is missing, then output/results.json."""
    from draftsmith.data.store.writer import writing_alone

    with writing_alone(config.output):
        return make(config)


def make(config: SpecDecPPConfig) -> Path:
    """Run the study, alone in its output."""
    config = config.sized()
    remember_settings(config)
    for step in [*label_steps(config), *training_steps(config)]:
        execute(step)
    measure_study(config)
    return config.output


def label_steps(config: SpecDecPPConfig) -> list[PipelineStep]:
    """Prompts, the target's answers and acceptance labels, of the prompts to train on and of dev prompts. Heads that
    exist need the latter only."""
    sets = {"eval": (config.dev_split, config.label_prompts)}
    if config.heads is None:
        sets = {"train": (config.train_split, config.train_prompts), **sets}
    return [step for name, (split, limit) in sets.items() for step in data_steps(config, name, split, limit)]


def data_steps(config: SpecDecPPConfig, name: str, split: str, limit: int) -> list[PipelineStep]:
    """Those of one set of prompts."""
    root = config.output / "data" / name

    def stage(title: str, kind: str, **settings: object) -> PipelineStep:
        done = root / kind / "manifest.json"
        return PipelineStep.of(
            f"{title} ({name})", f"data {kind}", done, target=config.target, **settings, output=root / kind
        )

    common = sampling(config) | {name: getattr(config, name) for name in ("seed", "dtype", "device", "num_threads")}
    answers = {"prompts": root / "prompts", "max_new_tokens": config.max_new_tokens, "batch_size": 128}
    return [
        stage("Prompts", "prompts", source=config.prompts, split=split, limit=limit, task=config.keep_tasks),
        stage("Answers of the target", "responses", **answers, **common),
        stage("Labels: which drafted tokens does the target keep?", "acceptance", responses=root / "responses",
              draft=config.draft, **common),
    ]  # fmt: skip


def training_steps(config: SpecDecPPConfig) -> list[PipelineStep]:
    """One head for every depth and weight."""
    if config.heads is not None:
        return []
    data, heads = config.output / "data", config.output / "heads"
    common = {name: getattr(config, name) for name in ("epochs", "batch_size", "lr", "seed", "num_threads")}
    common |= {"config": "acceptance-small", "draft": config.draft, "track": "csv", "resume": True}
    common |= {"data": data / "train" / "acceptance", "val": data / "eval" / "acceptance"}
    return [
        PipelineStep.of(f"Acceptance head: w_rej {weight:g}, D {depth}", "train acceptance", output / "training.json",
                w_rej=weight, num_blocks=depth, **common, output=output)
        for weight in config.weights
        for depth in config.depths
        for output in [heads / f"w{weight:g}-d{depth}"]
    ]  # fmt: skip


def bench_step(study: LoadedStudy, split: str, limit: int, methods: Sequence[str], head: str) -> PipelineStep:
    """Real decoding of these methods, with one head, one thread and its CPU time."""
    from draftsmith.eval.studies.specdecpp.found import run_name

    config = study.config
    output = config.output / "bench" / run_name(split, head)
    names = "target draft prompts keep_tasks max_new_tokens repeats seed dtype device engine"
    settings = {name: getattr(config, name) for name in names.split()} | sampling(config)
    settings |= {"acceptance": study.places[head], "methods": methods, "split": split, "limit": limit, "output": output}
    return PipelineStep.of(
        f"Bench on the {split} prompts, head {head}", "eval bench", output / "results.json", **settings
    )


def sampling(config: SpecDecPPConfig) -> dict[str, object]:
    """The sampling as every stage takes it."""
    return {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}


def measure_study(config: SpecDecPPConfig) -> None:
    """Rollouts and sweep, times, choice on the dev prompts, bench on the reported ones, results."""
    from draftsmith.data.console import log_note
    from draftsmith.data.store.reading import read_object
    from draftsmith.eval.studies.forward_times import bench_rows, fit_forward_times
    from draftsmith.eval.studies.specdecpp.found import Measurements, drafting, write_study_results
    from draftsmith.eval.studies.specdecpp.study import (
        choose_fastest,
        dev_methods,
        load_study,
        methods_by_head,
        rollouts_of,
    )
    from draftsmith.eval.studies.specdecpp.sweep import published_head

    study = load_study(config, config.heads or config.output / "heads")
    timing = published_head(study.heads) or next(iter(study.heads))
    dev = bench_step(study, config.dev_split, config.dev_prompts, dev_methods(config), timing)
    execute(dev)
    clock = read_object(dev.done, {"meta": {"clock": str}})["meta"]["clock"]
    dev_rows = bench_rows(dev.done.parent)
    times = fit_forward_times(drafting(dev_rows), clock)
    rollouts = {split: rollouts_of(study, split) for split in (config.dev_split, config.split)}
    log_note("Replaying every K, and every h of every head")
    chosen = choose_fastest(study, study.sweep(rollouts[config.dev_split]), times)
    tests = [
        bench_step(study, config.split, config.test_prompts, methods, head)
        for head, methods in methods_by_head(chosen.values(), config).items()
    ]
    for step in tests:
        execute(step)
    reported = study.sweep(rollouts[config.split])
    places = {name: config.output / "data" / name / "acceptance" for name in ("train", "eval")}
    labels = {name: place for name, place in places.items() if place.exists()}
    runs = {step.done.parent.name: bench_rows(step.done.parent) for step in tests}
    write_study_results(study, Measurements(rollouts, reported, chosen, times, dev_rows, clock, runs, labels))
