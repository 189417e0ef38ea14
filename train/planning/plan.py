"""`draftsmith plan`: what a training will take, before it runs; and the short form that every training prints."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from draftsmith.data.console import Column, Table, add_result, log_note, print_facts, print_table, print_text
from draftsmith.data.engines.own import set_threads
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import say_on_rank_zero
from draftsmith.train.planning.dry_run import NotRehearsed
from draftsmith.train.planning.estimate import TrainingPlan, check_room, has_texts, plan_of
from draftsmith.train.planning.measure import measure_steps
from draftsmith.train.planning.memory import LAYOUTS
from draftsmith.train.strategies import device_kind, settled


def run(config: Any) -> None:
    """Print the plan."""
    set_threads(config.num_threads)
    config = settled(config)
    import_deepspeed(config)
    plan = plan_of(config, config.world, config.assume_samples, config.assume_length)
    print_plan(plan, config)
    measured = measure_steps(config) if config.measure else None
    if measured is not None:
        print_text(measured.text(plan))
    add_result(**as_numbers(plan), measured=dataclasses.asdict(measured) if measured else None)


def import_deepspeed(config: TrainConfig) -> None:
    """What a training on it has imported by the time it reads its models: part of its memory."""
    if str(config.strategy).startswith("deepspeed"):
        if device_kind(config) == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # as the strategy does: else it looks for a GPU and warns
        try:
            import deepspeed  # noqa: F401
        except ImportError:
            log_note("deepspeed is not installed here: its own memory is not in the plan")


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
        say_on_rank_zero(f"no plan: {error}")
        return
    say_on_rank_zero(short_plan(plan))
    check_room(plan, config.output)


def short_plan(plan: TrainingPlan) -> str:
    """Two lines."""
    own = plan.own
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    return (
        f"plan: {short(plan.trained).strip()} trained and {short(plan.frozen).strip()} frozen parameters, "
        f"about {short(own.peak)}B of memory a rank ({ranks}, {LAYOUTS[plan.strategy]}; most in: {own.phase})\n"
        f"plan: {plan.steps:,} steps, {plan.steps_per_epoch:,} an epoch, {short(plan.step_flops)}FLOPs each; "
        f"checkpoints {short(plan.checkpoint_bytes)}B each, {short(plan.disk_bytes)}B at most"
    )


def print_plan(plan: TrainingPlan, config: TrainConfig) -> None:
    title = f"{plan.job} head for {plan.model}, planned from its config.json"
    print_facts(fact_rows(plan, config), title)
    print_table(memory_table(plan), bold="peak")


def fact_rows(plan: TrainingPlan, config: TrainConfig) -> dict[str, str]:
    documents, per_step = plan.documents, plan.documents.tokens / plan.steps_per_epoch
    rows = {
        "parameters": f"{short(plan.trained).strip()} trained, {short(plan.frozen).strip()} frozen",
        "data": f"{documents.source}: {len(documents.lengths):,} training samples, {documents.tokens:,} tokens",
        "steps": f"{plan.steps:,} of {per_step:,.0f} tokens: {plan.epochs:.3g} epochs of {plan.steps_per_epoch:,} "
        f"steps; {per_step * plan.steps:,.0f} tokens in all",
        "compute": f"{short(plan.step_flops)}FLOPs a step, {short(plan.step_flops * plan.steps)}FLOPs in all",
        "largest part": f"{plan.part_tokens:,} tokens on a rank at once "
        f"({plan.world} ranks, {config.accumulate} parts)",
        "checkpoints": f"{short(plan.checkpoint_bytes)}B each, float32 weights and averages; "
        f"{short(plan.disk_bytes)}B at most, with best/ and last/",
    }
    if plan.feature_bytes:
        there = "on disk" if plan.features_stored else "if stored"
        rows[f"features {there}"] = ", ".join(f"{short(v)}B in {k}" for k, v in plan.feature_bytes.items())
    return rows


def memory_table(plan: TrainingPlan) -> Table:
    """A row a part, a column a strategy."""
    own = plan.strategy
    shown = {LAYOUTS[key] + ("*" if key == own else ""): found for key in LAYOUTS if (found := plan.memories.get(key))}
    _, divisor, digits = memory_unit(plan)

    def cells(part: str, sizes: list[int]) -> dict[str, Any]:
        values = (f"{size / divisor:,.{digits}f}" for size in sizes)
        return {"part": part, **dict(zip(shown, values, strict=True))}

    rows: list[dict[str, Any]] = []
    for name in plan.own.parts:
        values = [found.parts[name] for found in shown.values()]
        if any(values):
            rows.append(cells(name, values))
    rows.append({**cells("most at a time", [found.peak for found in shown.values()]), "peak": True})
    rows.append({"part": "which is in", **{name: found.phase for name, found in shown.items()}})
    if any(found.host for found in shown.values()):
        rows.append(cells("host memory", [found.host for found in shown.values()]))
    columns = [Column("part", "part"), *(Column(name, name, ">") for name in shown)]
    title = f"Memory of a rank, {memory_unit(plan)[0]}; * as configured, off: with offload to host memory"
    return Table("memory", title, columns, rows)


def memory_unit(plan: TrainingPlan) -> tuple[str, float, int]:
    """Name, bytes and decimals of the unit that suits the table."""
    return ("GB", 1e9, 2) if plan.own.peak >= 1e10 else ("MB", 1e6, 0)


def as_numbers(plan: TrainingPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    documents = plan.documents
    return {
        **dataclasses.asdict(dataclasses.replace(plan, memories={})),
        "documents": {"source": documents.source, "samples": len(documents.lengths), "tokens": documents.tokens},
        "memories": {LAYOUTS[key]: dataclasses.asdict(value) for key, value in plan.memories.items()},
    }


def short(number: float) -> str:
    """1234567 -> `1.23 M`, to be followed by a unit or a noun."""
    for step, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= step:
            return f"{number / step:.3g} {letter}"
    return f"{number:,.0f} "
