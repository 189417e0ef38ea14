"""`draftsmith demo`: the whole pipeline on the embedded models, each step as the command that would run it alone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from draftsmith.launch.steps import PipelineStep, execute

TARGET, DRAFT, PROMPTS = "embedded:target", "embedded:draft", "embedded:prompts"
SPEC_K = (4, 6, 8)
EAGLE_K = (4, 5, 6)
THRESHOLDS = (0.3, 0.6)


@dataclass(frozen=True)
class DemoConfig:
    """Runs prompts, responses, labels, features, both trainings and the bench on the models that ship.

    Attributes:
        output: Directory of everything it makes; what is there already is not made again.
        full: Train longer and measure on more prompts.
        num_threads: CPU threads of the stages that make data and train; the bench takes one.
        seed: Of the trainings and of the order of samples.
    """

    output: Path = Path("runs/demo")
    full: bool = False
    num_threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Profile:
    """How much the demo does (configs/demo.yaml)."""

    tasks: str
    train_prompts: int
    max_new_tokens: int
    acceptance_epochs: int
    eagle_steps: int
    dev_prompts: int
    test_prompts: int
    repeats: int


def load_profile(full: bool) -> Profile:
    """`quick`, with the changes of `full`."""
    raw = yaml.safe_load((files("draftsmith.configs") / "demo.yaml").read_text())
    profile = Profile(**raw["quick"])
    unknown = set(raw["full"]) - {field.name for field in fields(Profile)}
    assert not unknown, f"configs/demo.yaml: unknown {unknown}"
    return replace(profile, **raw["full"]) if full else profile


def run(config: DemoConfig) -> Path:
    """Run what is missing, then print the table and where everything lies."""
    from draftsmith.data.store.writer import writing_alone

    with writing_alone(config.output):
        return make(config)


def make(config: DemoConfig) -> Path:
    """Run the demo, alone in its output."""
    from draftsmith.eval.report.command import missing_packages

    profile = load_profile(config.full)
    sized = config.output / ("full" if config.full else "quick")
    console = Console(highlight=False)
    started = time.monotonic()
    steps = [*data_steps(config, profile, sized), *training_steps(config, profile, sized)]
    for step in steps:
        execute(step, console)
    execute(bench_step(config, profile, sized, "dev", dev_methods(), profile.dev_prompts, repeats=1), console)
    chosen = choose_methods(read_results(sized / "dev"))
    methods = [*chosen.values(), "hf", "hf-assisted:k=5"]
    execute(bench_step(config, profile, sized, "test", methods, profile.test_prompts, profile.repeats), console)
    execute(export_step(sized), console)
    if missing_packages():
        console.print("No report page: pip install 'draftsmith[report]', then run this again")
    else:
        execute(page_step(sized), console)
    report(console, config, sized, chosen, time.monotonic() - started)
    return config.output


def data_steps(config: DemoConfig, profile: Profile, sized: Path) -> list[PipelineStep]:
    """Prompts, the target's own greedy answers, labels for greedy decoding, and features."""

    def stage(title: str, name: str, **settings: object) -> PipelineStep:
        done = sized / name / "manifest.json"
        return PipelineStep.of(title, f"data {name}", done, target=TARGET, **settings, output=sized / name)

    reads = {"responses": sized / "responses", "num_threads": config.num_threads}
    answers = {"temperature": 0, "batch_size": 128, "max_new_tokens": profile.max_new_tokens}
    return [
        stage("Prompts", "prompts", source=PROMPTS, split="train", task=profile.tasks, limit=profile.train_prompts),
        stage("Responses: the target answers, greedily, as it will decode", "responses", prompts=sized / "prompts",
              **answers, num_threads=config.num_threads),
        stage("Labels: which drafted tokens does the target keep?", "acceptance", **reads, draft=DRAFT, temperature=0),
        stage("Features: the target's hidden states", "features", **reads),
    ]  # fmt: skip


def training_steps(config: DemoConfig, profile: Profile, sized: Path) -> list[PipelineStep]:
    """The acceptance head for the draft, and the EAGLE head for the target."""

    def training(title: str, kind: str, **settings: object) -> PipelineStep:
        output = sized / f"{kind}-head"
        common = {"output": output, "seed": config.seed, "resume": True}
        return PipelineStep.of(
            title, f"train {kind}", output / "training.json", config=f"{kind}-small", **settings, **common
        )

    steps, epochs = profile.eagle_steps, profile.acceptance_epochs
    return [
        training("Acceptance head (SpecDec++)", "acceptance", data=sized / "acceptance", draft=DRAFT, epochs=epochs),
        training("EAGLE head", "eagle", data=sized / "features", target=TARGET, max_steps=steps, val_every=steps // 4),
    ]


def bench_step(
    config: DemoConfig, profile: Profile, sized: Path, split: str, methods: Sequence[str], limit: int, repeats: int
) -> PipelineStep:
    """Methods against each other on held-out prompts, answers to the end token."""
    title = "Settings, chosen on the dev prompts" if split == "dev" else "Measurement on the test prompts"
    heads = {"draft": [DRAFT, sized / "eagle-head" / "best"], "acceptance": sized / "acceptance-head" / "best"}
    prompts = {"prompts": PROMPTS, "split": split, "keep_tasks": profile.tasks, "limit": limit}
    how = {"max_new_tokens": profile.max_new_tokens, "repeats": repeats, "seed": config.seed}
    more = {} if split == "dev" else {"card": True, "traces": 1}
    return PipelineStep.of(title, "eval bench", sized / split / "results.json", target=TARGET, **heads,
                methods=methods, **prompts, **how, output=sized / split, **more)  # fmt: skip


def export_step(sized: Path) -> PipelineStep:
    """The EAGLE head as vLLM loads it, read back by vLLM's rules."""
    head, output = sized / "eagle-head" / "best", sized / "vllm"
    title = "The EAGLE head for vLLM, checked"
    return PipelineStep.of(title, "export", output / "README.md", format="vllm", head=head, output=output)


def page_step(sized: Path) -> PipelineStep:
    """The measurement as a page to look at, with an answer of each task round by round."""
    page = sized / "report.html"
    return PipelineStep.of("The report", "eval report", page, runs=sized / "test", title="Draftsmith demo", output=page)


def dev_methods() -> list[str]:
    """Every setting that the dev prompts choose from."""
    spec = [f"spec:k={k}" for k in SPEC_K]
    stop = [f"specdec++:h={h}:calibrated=on" for h in THRESHOLDS]
    return [*spec, *stop, *(f"eagle:k={k}" for k in EAGLE_K), "online", "online:drafter=eagle"]


def read_results(directory: Path) -> dict[str, Any]:
    from draftsmith.data.store.reading import read_object

    return read_object(directory / "results.json", {"methods": [{"method": str, "tokens_per_s": float}]})


def choose_methods(dev: Mapping[str, Any]) -> dict[str, str]:
    """The fastest setting of each method on the dev prompts."""
    best: dict[str, Any] = {}
    for row in dev["methods"]:
        name = row["method"].split(":")[0]
        if name != "ar" and (name not in best or row["tokens_per_s"] > best[name]["tokens_per_s"]):
            best[name] = row
    return {name: row["method"] for name, row in best.items()}


def head_lines(sized: Path) -> list[str]:
    """What training measured on held-out samples."""
    numbers = {
        name: json.loads((sized / f"{name}-head" / "training.json").read_text())["best"]
        for name in ("acceptance", "eagle")
    }
    acceptance, eagle = numbers["acceptance"], numbers["eagle"]
    return [
        f"acceptance head: AUC {acceptance['auc']:.3f} (of the draft's own q(y): {acceptance['auc_q']:.3f}), "
        f"calibrated ECE {acceptance['ece_platt']:.3f}",
        f"EAGLE head: top-1 {eagle['top1']:.3f}, top-3 {eagle['top3']:.3f} of the target's choices",
    ]


def report(console: Console, config: DemoConfig, sized: Path, chosen: Mapping[str, str], seconds: float) -> None:
    """One table, the heads' own numbers, and where everything lies."""
    from draftsmith.data.store.files import write_text
    from draftsmith.eval.bench.tables import results_tables, screen
    from draftsmith.eval.report.tables import markdown

    results = read_results(sized / "test")
    table = results_tables(results)[0]
    console.print()
    console.print(screen(table))
    speed = {row["method"]: row["tokens_per_s"] for row in results["methods"]}
    assisted = speed["hf-assisted:k=5"]
    lines = [f"{method}: {speed[method] / assisted:.2f}x over hf-assisted:k=5" for method in chosen.values()]
    lines += head_lines(sized)
    for line in lines:
        console.print(line)
    places = {
        "table": sized / "REPORT.md",
        "report": sized / "report.html",
        "results": sized / "test" / "results.json",
        "EAGLE head": sized / "eagle-head" / "best",
        "acceptance head": sized / "acceptance-head" / "best",
        "EAGLE head for vLLM": sized / "vllm",
    }
    write_text(sized / "REPORT.md", "\n".join([markdown(table), "", *(f"- {line}" for line in lines), ""]))
    for name, path in places.items():
        if path.exists():  # the page needs packages that may be missing
            console.print(f"[dim]{name}:[/dim] {path}")
    console.print(f"[dim]{seconds / 60:.1f} minutes in this run; run it again and it goes on from what is there[/dim]")
