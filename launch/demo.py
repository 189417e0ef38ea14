"""`draftsmith demo`: run the whole pipeline on the embedded models, one command after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.launch.pipeline import PipelineStep, execute, plan_steps, read_plan


@dataclass(frozen=True)
class DemoConfig:
    """Run prompts, responses, labels, features, three trainings and the bench on the models that ship.

    Attributes:
        output: Directory of everything it makes; finished steps are not run again.
        full: Train longer and measure on more prompts.
        num_threads: CPU threads of data stages and trainings; the bench uses one.
    """

    output: Path = Path("runs/demo")
    full: bool = False
    num_threads: int = 2

    @property
    def directory(self) -> Path:
        """Directory of the runs of this size."""
        return self.output / ("full" if self.full else "quick")


def run(config: DemoConfig) -> Path:
    """Run the steps that are missing, then print the table and the paths of the results."""
    from draftsmith.data.console import log_note
    from draftsmith.data.store.writer import writing_alone
    from draftsmith.eval.report.command import missing_packages

    with writing_alone(config.output):
        started = time.monotonic()
        for step in demo_steps(config)[:-3]:
            execute(step)
        # The last three steps use the settings that the dev prompts chose.
        chosen = choose_methods(read_results(config.directory / "dev"))
        test, export, page = demo_steps(config, chosen.values())[-3:]
        execute(test)
        execute(export)
        if missing_packages():
            log_note("No report page: pip install 'draftsmith[report]', then run this again")
        else:
            execute(page)
        print_summary(config.directory, chosen)
        minutes = (time.monotonic() - started) / 60
        log_note(f"{minutes:.1f} minutes in this run; a second run skips what is finished")
        return config.output


def demo_steps(config: DemoConfig, chosen: Iterable[str] = ("ar",)) -> list[PipelineStep]:
    """Return the steps of configs/demo.yaml, with the methods to measure in the test."""
    plan = read_plan("demo")
    settings = {**plan["quick"], **(plan["full"] if config.full else {}), **vars(config)}
    settings |= {"output": config.directory, "chosen": ",".join(chosen)}
    return plan_steps(plan, settings, config.directory)


def read_results(directory: Path) -> dict[str, Any]:
    """Read the results of a bench."""
    from draftsmith.modules.pretrained.reading import read_object

    return read_object(directory / "results.json", {"methods": [{"method": str, "tokens_per_s": float}]})


def choose_methods(dev: Mapping[str, Any]) -> dict[str, str]:
    """Return the fastest setting of each method on the dev prompts."""
    best: dict[str, Any] = {}
    for row in dev["methods"]:
        name = row["method"].split(":")[0]
        if name != "ar" and (name not in best or row["tokens_per_s"] > best[name]["tokens_per_s"]):
            best[name] = row
    return {name: row["method"] for name, row in best.items()}


def print_summary(directory: Path, chosen: Mapping[str, str]) -> None:
    """Print one table, the heads' own numbers, and the paths of the results; write the former to REPORT.md."""
    from draftsmith.data.console import print_table, print_text
    from draftsmith.eval.bench.results import results_tables
    from draftsmith.eval.report.tables import markdown
    from draftsmith.modules.pretrained.files import write_text

    results = read_results(directory / "test")
    table = results_tables(results)[0]
    print_table(table, bold="fastest")
    speed = {row["method"]: row["tokens_per_s"] for row in results["methods"]}
    assisted = speed["hf-assisted:k=5"]
    lines = [f"{method}: {speed[method] / assisted:.2f}x over hf-assisted:k=5" for method in chosen.values()]

    acceptance, eagle, eagle3 = (
        json.loads((directory / f"{name}-head" / "training.json").read_text())["best"]
        for name in ("acceptance", "eagle", "eagle3")
    )
    lines += [
        f"acceptance head: AUC {acceptance['auc']:.3f} (of the draft's own q(y): {acceptance['auc_q']:.3f}), "
        f"calibrated ECE {acceptance['ece_platt']:.3f}",
        f"EAGLE head: top-1 {eagle['top1']:.3f}, top-3 {eagle['top3']:.3f} of the target's choices",
        f"EAGLE-3 head: top-1 {eagle3['top1']:.3f}; a first token is accepted with {eagle3['accepted']:.3f} at T=1",
    ]
    for line in lines:
        print_text(line)
    write_text(directory / "REPORT.md", "\n".join([markdown(table), "", *(f"- {line}" for line in lines), ""]))
    print_text(f"Written to {directory}: REPORT.md, report.html, test/results.json, *-head/best, vllm")
