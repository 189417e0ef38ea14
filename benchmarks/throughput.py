"""`python benchmarks/throughput.py`: what a training step costs, in ratios.

Our step stands beside a bare PyTorch loop over the same head and loss, and beside the straightforward form of
SafeAILab's trainer (step_variants.py). One thread, process CPU time; the variants take turns step by step, so that
a machine whose speed drifts favours none. Memory is the peak of a process of its own (step_peak.py).
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.benchmarks.loss_cost import loss_ratios
from draftsmith.benchmarks.step_peak import in_new_process
from draftsmith.benchmarks.step_variants import Bare, ByHand, Padded, Shape, TakenStep, Work, train_ours
from draftsmith.data.console import say
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.manifest import git_commit, package_versions, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.eagle.head import LOOKAHEAD, eagle_training
from draftsmith.modules.types import InputError
from draftsmith.train.telemetry import measured_peak

HEADINGS = ("what", "value", "aim")
# The loss alone: tokens, and a vocabulary as large as Llama 3's. The hidden size says little about its memory.
LOSS_SHAPE = Shape(hidden=256, vocab=128_000, tokens=2048)
WARM_UP = 2  # steps that are not counted
PEAK_FOR_S = 3.0


@dataclass(frozen=True)
class ThroughputConfig:
    """Measures a training step against a bare loop and against the straightforward form, on one CPU thread.

    Attributes:
        output: Directory that receives throughput.json and throughput.md.
        only: Part of it: speed, memory (of steps), loss-memory (of the loss alone), losses (their time), or all.
        hidden: Hidden size of target and head.
        vocab: Tokens that the target knows.
        layers: Decoder layers of the head.
        tokens: In a batch.
        documents: Made up, with the lengths of dialogues: log-normal, 50 to 1500 tokens.
        dtype: float32, or bfloat16: the target's weights, with autocast around the head.
        steps: Counted ones of each variant; 0 takes as many as read every document once.
        compile_head: Measure a bare loop with torch.compile around the head, too.
        seed: Of weights and documents.
    """

    output: Path = field(kw_only=True)
    only: Literal["all", "speed", "memory", "loss-memory", "losses"] = "all"
    hidden: int = 512
    vocab: int = 32_000
    layers: int = 1
    tokens: int = 2048
    documents: int = 48
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 0
    compile_head: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"hidden": 64, "vocab": 16, "layers": 1, "documents": 2, "steps": 0, "tokens": 1500}.items():
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"{least} or more", "Change it.")

    @property
    def shape(self) -> Shape:
        return Shape(self.hidden, self.vocab, self.layers, self.tokens, self.documents, 1.0, self.dtype, self.seed)


@dataclass(frozen=True)
class MeasuredNumber:
    """One number, and what is aimed at."""

    what: str
    value: float
    unit: str
    aim: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        digits = {"x": 2, "%": 1, "MB": 0, "tokens/s": 0}[self.unit]
        return self.what, f"{self.value:,.{digits}f}{'' if self.unit in 'x%' else ' '}{self.unit}", self.aim


def tokens_per_s(steps: Sequence[TakenStep]) -> float:
    """Documents' own tokens a second, over all steps: a ratio of sums."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def slower(ours: Sequence[TakenStep], theirs: Sequence[TakenStep]) -> float:
    """Per cent by which our steps take longer than theirs on the same batches: the median over pairs."""
    return 100 * (statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)) - 1)


def paired_steps(work: Work, steps: int, other: str, warm_up: int = WARM_UP) -> tuple[list[TakenStep], list[TakenStep]]:
    """Counted steps of ours and of another variant, which take turns."""
    total = warm_up + steps + 1
    with tempfile.TemporaryDirectory(prefix="draftsmith-throughput-") as folder:
        config = work.settings(Path(folder) / "run", total)
        plain = {"padded": Padded, "by hand": ByHand}
        loop = plain[other](work, config) if other in plain else Bare(work, config, compiled="compiled" in other)
        theirs: list[TakenStep] = []

        def step() -> None:
            if len(theirs) < total - 1:  # our last step is not timed to its end
                theirs.append(loop.step())

        ours = train_ours(work, config, step)
    return ours[warm_up:], theirs[warm_up:]


def step_flops(work: Work, config: ThroughputConfig) -> float:
    """Model FLOPs of a token, on average over the documents."""
    lengths = work.samples.lengths
    rows = [max(0, length - LOOKAHEAD) for length in lengths]
    counted = sum(int(work.samples.dataset[i]["loss_mask"][LOOKAHEAD:].sum()) for i in range(len(lengths)))
    return eagle_training(work.head.config.llama, rows, counted) / sum(lengths)


def speed(config: ThroughputConfig) -> Iterator[MeasuredNumber]:
    work = Work(config.shape)
    steps = config.steps or -(-int(sum(work.samples.lengths)) // config.tokens)
    ours, bare = paired_steps(work, steps, "bare")
    yield MeasuredNumber("bare: tokens a CPU second", tokens_per_s(bare), "tokens/s")
    yield MeasuredNumber("ours: tokens a CPU second", tokens_per_s(ours), "tokens/s")
    yield MeasuredNumber("ours takes longer than the bare loop by", slower(ours, bare), "%", "<= 3")
    by_hand = paired_steps(work, steps, "by hand")
    yield MeasuredNumber("by hand: tokens a CPU second", tokens_per_s(by_hand[1]), "tokens/s")
    yield MeasuredNumber("ours / by hand, median over steps", 1 / (1 + slower(*by_hand) / 100), "x", ">= 0.97")
    again, padded = paired_steps(work, steps, "padded")
    yield MeasuredNumber("padded: tokens a CPU second", tokens_per_s(padded), "tokens/s")
    yield MeasuredNumber(
        "ours / padded, tokens a CPU second", tokens_per_s(again) / tokens_per_s(padded), "x", ">= 1.5"
    )
    if config.compile_head:
        third, compiled = paired_steps(work, steps, "bare, compiled")
        # Each against ours of its own run, as the machine may have changed its speed between them.
        ratio = (1 + slower(third, compiled) / 100) / (1 + slower(ours, bare) / 100)
        yield MeasuredNumber("bare with torch.compile for the head / without", ratio, "x")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    most = measured_peak(torch.device("cpu"), dtype, time.process_time, PEAK_FOR_S)
    utilisation = 100 * step_flops(work, config) * tokens_per_s(ours) / most
    yield MeasuredNumber("ours: model FLOPs of what matrix products reach here", utilisation, "%")


def measured_memory(config: ThroughputConfig) -> Iterator[MeasuredNumber]:
    peaks = {name: in_new_process(name, config.shape) for name in ("ours", "bare", "padded")}
    for name, peak in peaks.items():
        yield MeasuredNumber(f"{name}: peak memory of a step", peak / 1e6, "MB")
    yield MeasuredNumber("padded / ours, peak memory", peaks["padded"] / peaks["ours"], "x", ">= 2")


def loss_memory(config: ThroughputConfig) -> Iterator[MeasuredNumber]:
    shape = replace(LOSS_SHAPE, seed=config.seed)
    where = f"{shape.tokens} tokens, {shape.vocab // 1000}k vocabulary"
    peaks = {name: in_new_process(name, shape) for name in ("loss", "naive loss")}
    yield MeasuredNumber(f"EAGLE loss in chunks: peak memory, {where}", peaks["loss"] / 1e6, "MB")
    yield MeasuredNumber(f"the naive form: peak memory, {where}", peaks["naive loss"] / 1e6, "MB")
    yield MeasuredNumber("in chunks / naive, peak memory", 100 * peaks["loss"] / peaks["naive loss"], "%", "<= 33")


def losses(config: ThroughputConfig) -> Iterator[MeasuredNumber]:
    for what, ratio in loss_ratios(config.hidden, config.vocab):
        yield MeasuredNumber(what, ratio, "x")


PARTS = {"speed": speed, "memory": measured_memory, "loss-memory": loss_memory, "losses": losses}


@sole_writer()
def run(config: ThroughputConfig) -> Path:
    """Measure, print every row as it comes, write throughput.json and throughput.md; returns the directory."""
    torch.set_num_threads(1)
    started = time.process_time()
    rows = []
    for name, part in PARTS.items():
        for row in part(config) if config.only in ("all", name) else ():
            rows.append(row)
            say(" | ".join(row.cells))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(HEADINGS[0], overflow="fold")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row.cells)
    Console(highlight=False).print(table)
    make_directory(config.output)
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ("---", "---:", "---:"), *(r.cells for r in rows))]
    write_text(config.output / "throughput.md", "\n".join(lines) + "\n")
    meta = {
        "settings": resolved(config),
        "machine": platform.processor() or platform.machine(),
        "cpu_s": time.process_time() - started,
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_json(config.output / "throughput.json", {"meta": meta, "rows": [asdict(row) for row in rows]})
    return config.output


if __name__ == "__main__":
    sys.exit(main_of(ThroughputConfig, run))
