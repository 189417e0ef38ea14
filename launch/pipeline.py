"""Pipelines: commands from a shipped YAML file, one after the other, of which finished ones are skipped."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from draftsmith.launch.cli import dispatch


@dataclass(frozen=True)
class PipelineStep:
    """One command of a pipeline; it is finished when `done` exists, which the command writes last.

    minutes: expected duration on two idle cores; 0 if unknown.
    """

    title: str
    argv: tuple[str, ...]
    done: Path
    minutes: float = 0.0


def read_plan(name: str) -> dict[str, Any]:
    """Read a shipped pipeline, configs/NAME.yaml."""
    return yaml.safe_load((files("draftsmith.configs") / f"{name}.yaml").read_text())


def plan_steps(plan: Mapping[str, Any], settings: Mapping[str, Any], directory: Path) -> list[PipelineStep]:
    """Build the steps of a plan.

    settings: values of the {names} in its commands. A step with `when` is left out unless that setting is true; its
    `minutes` are a constant and what 1,000 `prompts` add.
    """
    steps = []
    for step in plan["steps"]:
        if settings[step["when"]] if "when" in step else True:
            words = tuple(word.format(**settings) for word in shlex.split(step["run"]))
            constant, per_thousand = step.get("minutes", (0, 0))
            minutes = constant + per_thousand * settings.get("prompts", 0) / 1000
            steps.append(PipelineStep(step["title"], words, directory / step["done"], minutes))
    return steps


def execute(step: PipelineStep, remaining: str = "") -> None:
    """Run a step through the command line's own parser, unless it is finished. remaining: time left, for the log."""
    from draftsmith.data.console import log_note
    from draftsmith.modules.pretrained.files import write_text

    remaining = " (done before)" if step.done.exists() else remaining
    log_note(Text.assemble("\n", (step.title, "bold"), (remaining, "dim")))
    log_note(Text(f"  draftsmith {shlex.join(step.argv)}", "cyan"))
    if step.done.exists():
        return
    started = time.monotonic()
    code = dispatch(list(step.argv))
    if code:  # the command has printed why
        raise SystemExit(code)
    if not step.done.exists():  # a check writes nothing of its own
        write_text(step.done, "")
    log_note(Text(f"  {time.monotonic() - started:.0f} s", "dim"))


def run_steps(steps: Sequence[PipelineStep]) -> None:
    """Run the steps that are missing, and say before each one how long it and all that is left should take.

    Expected minutes are corrected by what the steps of this run took.
    """
    expected = spent = 0.0
    for number, step in enumerate(steps):
        left = sum(later.minutes for later in steps[number:] if not later.done.exists())
        # A few seconds say nothing about the speed of the machine.
        pace = spent / expected if expected >= 1 else 1.0
        complete, began, started = step.done.exists(), step.done.parent.exists(), time.monotonic()
        now, rest = max(1.0, step.minutes * pace), max(1.0, left * pace)
        execute(step, f" ({number + 1} of {len(steps)}; about {now:.0f} min, all that is left {rest:.0f} min)")
        if not (complete or began):
            expected, spent = expected + step.minutes, spent + (time.monotonic() - started) / 60
