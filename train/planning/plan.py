"""`draftsmith plan`: what a training will take, before it runs; and the short form that every training prints."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.data.answering.batched import set_threads
from draftsmith.data.progress import say
from draftsmith.data.store.files import write_json
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import is_first_process
from draftsmith.train.planning.documents import has_texts
from draftsmith.train.planning.dry_run import NotRehearsed
from draftsmith.train.planning.estimate import TrainingPlan, check_room, plan_of, planned_device
from draftsmith.train.planning.measure import measure_steps
from draftsmith.train.planning.memory import LAYOUTS

WIDEST = 100  # longer lines are hard to read


def run(config: Any) -> Path | None:
    """Print the plan; returns the file with its numbers, if one was asked for."""
    set_threads(config.num_threads)
    import_deepspeed(config)
    plan = plan_of(config, config.world, config.assume_samples, config.assume_length)
    screen = Console(highlight=False)
    console = Console(highlight=False, width=min(screen.width, WIDEST))
    print_plan(plan, config, console)
    measured = None
    if config.measure:
        measured = measure_steps(config, plan)
        console.print(measured.text(plan), markup=False)
    if config.json is None:
        return None
    numbers = {**as_numbers(plan), "measured": dataclasses.asdict(measured) if measured else None}
    write_json(config.json, numbers)
    return config.json


def import_deepspeed(config: TrainConfig) -> None:
    """What a training on it has imported by the time it reads its models: part of its memory."""
    if str(config.strategy).startswith("deepspeed"):
        if planned_device(config) == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # as the strategy does: else it looks for a GPU and warns
        try:
            import deepspeed  # noqa: F401
        except ImportError:
            say("deepspeed is not installed here: its own memory is not in the plan")


def announce(config: TrainConfig) -> None:
    """The short form, as a training prints it when it begins, before any weights are read.

    Data that is not there, or not what a training reads, is left for the training to tell.

    Raises:
        InputError: the disk cannot hold the checkpoints.
    """
    if not has_texts(config.data):
        return
    try:
        plan = plan_of(config)
    except NotRehearsed as error:  # the training may run all the same
        if is_first_process():
            say(f"no plan: {error}")
        return
    if is_first_process():
        say(short_plan(plan))
    check_room(plan, config.output)


def short_plan(plan: TrainingPlan) -> str:
    """Two lines."""
    own = plan.own
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    return (
        f"plan: {short_count(plan.trained).strip()} trained and {short_count(plan.frozen).strip()} frozen parameters, "
        f"about {size(own.peak)} of memory a rank ({ranks}, {LAYOUTS[plan.strategy]}; most in: {own.phase})\n"
        f"plan: {plan.steps:,} steps, {plan.steps_per_epoch:,} an epoch, {short_count(plan.step_flops)}FLOPs each; "
        f"checkpoints {size(plan.checkpoint_bytes)} each, {size(plan.disk_bytes)} at most"
    )


def print_plan(plan: TrainingPlan, config: TrainConfig, console: Console) -> None:
    console.print(f"{plan.job} head for {plan.model}, planned from its config.json\n", markup=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="cyan")
    facts.add_column()
    for name, value in fact_rows(plan, config):
        facts.add_row(name, value)
    console.print(facts)
    console.print(f"\nMemory of a rank, {memory_unit(plan)[0]}; * as configured, off: with offload to host memory")
    console.print(memory_table(plan))


def fact_rows(plan: TrainingPlan, config: TrainConfig) -> list[tuple[str, str]]:
    documents, per_step = plan.documents, plan.documents.tokens / plan.steps_per_epoch
    rows = [
        ("parameters", f"{short_count(plan.trained).strip()} trained, {short_count(plan.frozen).strip()} frozen"),
        ("data", f"{documents.source}: {len(documents.lengths):,} training samples, {documents.tokens:,} tokens"),
        (
            "steps",
            f"{plan.steps:,} of {per_step:,.0f} tokens: {plan.epochs:.3g} epochs of {plan.steps_per_epoch:,} steps; "
            f"{per_step * plan.steps:,.0f} tokens in all",
        ),
        (
            "compute",
            f"{short_count(plan.step_flops)}FLOPs a step, {short_count(plan.step_flops * plan.steps)}FLOPs in all",
        ),
        (
            "largest part",
            f"{plan.part.tokens:,} tokens on a rank at once ({plan.world} ranks, {config.accumulate} parts)",
        ),
        (
            "checkpoints",
            f"{size(plan.checkpoint_bytes)} each, float32 weights and averages; {size(plan.disk_bytes)} at most, with "
            f"best/ and last/",
        ),
    ]
    if plan.feature_bytes:
        there = "on disk" if documents.kind == "features" and not documents.assumed else "if stored"
        rows.append((f"features {there}", ", ".join(f"{size(v)} in {k}" for k, v in plan.feature_bytes.items())))
    return rows


def memory_table(plan: TrainingPlan) -> Table:
    """A row a part, a column a strategy."""
    keys = [key for key in LAYOUTS if key in plan.memories]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("part")
    for key in keys:
        table.add_column(LAYOUTS[key] + ("*" if key == plan.strategy else ""), justify="right")
    _, divisor, digits = memory_unit(plan)
    for name in plan.own.parts:
        values = [plan.memories[key].parts[name] for key in keys]
        if any(values):
            table.add_row(name, *(f"{value / divisor:,.{digits}f}" for value in values))
    table.add_section()
    table.add_row("most at a time", *(f"{plan.memories[key].peak / divisor:,.{digits}f}" for key in keys), style="bold")
    table.add_row("which is in", *(plan.memories[key].phase for key in keys))
    if any(plan.memories[key].host for key in keys):
        table.add_row("host memory", *(f"{plan.memories[key].host / divisor:,.{digits}f}" for key in keys))
    return table


def memory_unit(plan: TrainingPlan) -> tuple[str, float, int]:
    """Name, bytes and decimals of the unit that suits the table."""
    return ("GB", 1e9, 2) if plan.own.peak >= 1e10 else ("MB", 1e6, 0)


def as_numbers(plan: TrainingPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    numbers = {name: value for name, value in dataclasses.asdict(plan).items() if name not in ("documents", "memories")}
    documents = plan.documents
    numbers["documents"] = {"source": documents.source, "samples": len(documents.lengths), "tokens": documents.tokens}
    numbers["memories"] = {LAYOUTS[key]: dataclasses.asdict(value) for key, value in plan.memories.items()}
    return numbers


def short_count(number: float) -> str:
    """1234567 -> `1.23 M`, to be followed by a unit or a noun."""
    for step, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= step:
            return f"{number / step:.3g} {letter}"
    return f"{number:,.0f} "


def size(number: float) -> str:
    """Bytes for people: 1234567 -> `1.23 MB`."""
    for step, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= step:
            return f"{number / step:.3g} {unit}"
    return f"{number:.0f} B"
