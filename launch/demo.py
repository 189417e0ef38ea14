"""`draftsmith demo`: the whole pipeline on the embedded models, each step as the command that would run it alone."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from draftsmith.launch.steps import PipelineStep, execute


@dataclass(frozen=True)
class DemoConfig:
    """Runs prompts, responses, labels, features, both trainings and the bench on the models that ship.

    Attributes:
        output: Directory of everything it makes; what is there already is not made again.
        full: Train longer and measure on more prompts.
        num_threads: CPU threads of the stages that make data and train; the bench takes one.
        seed: Of the trainings and of the order of samples.
        wandb: Weights & Biases for the trainings; a demo logs nothing there by itself, key or not.
    """

    output: Path = Path("runs/demo")
    full: bool = False
    num_threads: int = 2
    seed: int = 0
    wandb: Literal["offline", "online", "off"] = "off"

    @property
    def directory(self) -> Path:
        """Of everything of this size."""
        return self.output / ("full" if self.full else "quick")


def run(config: DemoConfig) -> Path:
    """Run what is missing, then print the table and where everything lies."""
    from draftsmith.data.store.writer import writing_alone

    with writing_alone(config.output):
        return make(config)


def make(config: DemoConfig) -> Path:
    """Run the demo, alone in its output."""
    from draftsmith.data.console import log_note
    from draftsmith.eval.report.command import missing_packages

    started = time.monotonic()
    for step in demo_steps(config)[:-3]:
        execute(step)
    chosen = choose_methods(read_results(config.directory / "dev"))
    test, export, page = demo_steps(config, chosen.values())[-3:]
    execute(test)
    execute(export)
    if missing_packages():
        log_note("No report page: pip install 'draftsmith[report]', then run this again")
    else:
        execute(page)
    report(config.directory, chosen, time.monotonic() - started)
    return config.output


def demo_steps(config: DemoConfig, chosen: Iterable[str] = ("ar",)) -> list[PipelineStep]:
    """What configs/demo.yaml lists. chosen: methods to measure, which the step before says."""
    plan = yaml.safe_load((files("draftsmith.configs") / "demo.yaml").read_text())
    assert set(plan["full"]) <= set(plan["quick"]), "configs/demo.yaml: sizes of `full` alone"
    settings = {**plan["quick"], **(plan["full"] if config.full else {}), **vars(config)}
    settings |= {"output": config.directory, "chosen": ",".join(chosen)}
    steps = []
    for step in plan["steps"]:
        words = tuple(word.format(**settings) for word in shlex.split(step["run"]))
        steps.append(PipelineStep(step["title"], words, config.directory / step["done"]))
    return steps


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
        for name in ("acceptance", "eagle", "eagle3")
    }
    acceptance, eagle, eagle3 = numbers["acceptance"], numbers["eagle"], numbers["eagle3"]
    return [
        f"acceptance head: AUC {acceptance['auc']:.3f} (of the draft's own q(y): {acceptance['auc_q']:.3f}), "
        f"calibrated ECE {acceptance['ece_platt']:.3f}",
        f"EAGLE head: top-1 {eagle['top1']:.3f}, top-3 {eagle['top3']:.3f} of the target's choices",
        f"EAGLE-3 head: top-1 {eagle3['top1']:.3f}; a first token is accepted with {eagle3['accepted']:.3f} at T=1",
    ]


def report(sized: Path, chosen: Mapping[str, str], seconds: float) -> None:
    """One table, the heads' own numbers, and where everything lies."""
    from draftsmith.data.console import log_note, print_text
    from draftsmith.data.store.files import write_text
    from draftsmith.eval.bench.tables import results_tables, show_results
    from draftsmith.eval.report.tables import markdown

    results = read_results(sized / "test")
    table = results_tables(results)[0]
    show_results(table)
    speed = {row["method"]: row["tokens_per_s"] for row in results["methods"]}
    assisted = speed["hf-assisted:k=5"]
    lines = [f"{method}: {speed[method] / assisted:.2f}x over hf-assisted:k=5" for method in chosen.values()]
    lines += head_lines(sized)
    for line in lines:
        print_text(line)
    places = {
        "table": sized / "REPORT.md",
        "report": sized / "report.html",
        "results": sized / "test" / "results.json",
        "EAGLE head": sized / "eagle-head" / "best",
        "EAGLE-3 head": sized / "eagle3-head" / "best",
        "acceptance head": sized / "acceptance-head" / "best",
        "EAGLE head for vLLM": sized / "vllm",
    }
    write_text(sized / "REPORT.md", "\n".join([markdown(table), "", *(f"- {line}" for line in lines), ""]))
    for name, path in places.items():
        if path.exists():  # the page needs packages that may be missing
            print_text(f"{name}: {path}")
    log_note(f"{seconds / 60:.1f} minutes in this run; run it again and it goes on from what is there")
