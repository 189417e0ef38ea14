"""`draftsmith eval generation`: what batching is worth when the target answers the prompts of a data set.

The baseline is what people write first: transformers' `generate`, one prompt after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from draftsmith.data.answering.batched import answer_all, set_threads
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.hf_baseline import HFRunner, load_hf_model
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.types import SamplingParams, at_least

RESULTS = "generation.json"
Answers = list[list[int]]


@dataclass(frozen=True)
class GenerationConfig:
    """Measures `data responses` (in process) against transformers' generate, prompt by prompt: greedy, CPU time.

    target: model directory, hub id or embedded:target.
    prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
    output: directory that receives generation.json.
    split: keep prompts of this split.
    keep_tasks: keep prompts of these tasks, separated by commas.
    limit: the first so many prompts; 0 takes all.
    max_new_tokens: longest answer.
    batch_size: prompts answered together.
    engine: lean (Llama family), hf (any transformers model), or auto.
    num_threads: CPU threads.
    repeats: runs of both; the median of the paired ratios counts.
    """

    target: str
    prompts: str
    output: Path
    split: str | None = None
    keep_tasks: str | None = None
    limit: int = 64
    max_new_tokens: int = 256
    batch_size: int = 32
    engine: Literal["auto", "lean", "hf"] = "auto"
    num_threads: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        at_least("limit", self.limit, 0)
        for name in ("max_new_tokens", "batch_size", "num_threads", "repeats"):
            at_least(name, getattr(self, name), 1)


@sole_writer()
def run(config: GenerationConfig) -> Path:
    """Measure, print the ratio, write generation.json; returns its path."""
    set_threads(config.num_threads)
    rows = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    prompts = [row.prompt_ids for row in rows]
    lm = load_lm(config.target, engine=config.engine, packed=True)
    hf = HFRunner(load_hf_model(config.target, "float32", "cpu"), SamplingParams(), lm.info.eos_ids)

    def batched(some: Sequence[list[int]]) -> Answers:
        return answer_all(lm, some, SamplingParams(), config.max_new_tokens, config.batch_size)

    def one_by_one(some: Sequence[list[int]]) -> Answers:
        return [hf(prompt, config.max_new_tokens, 0).tokens for prompt in some]

    batched(prompts[:2]), one_by_one(prompts[:2])  # warm up
    pairs = [(timed(batched, prompts), timed(one_by_one, prompts)) for _ in range(config.repeats)]
    (ours, _), (theirs, _) = pairs[0]
    tokens = sum(map(len, ours)), sum(map(len, theirs))
    rates = [statistics.median(tokens[i] / pair[i][1] for pair in pairs) for i in (0, 1)]
    ratio = statistics.median((tokens[0] / a[1]) / (tokens[1] / b[1]) for a, b in pairs)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    numbers = {
        "prompts": len(prompts),
        "tokens": tokens[0],
        "equal_answers": equal,
        "tokens_per_cpu_s": rates[0],
        "baseline_tokens_per_cpu_s": rates[1],
        "ratio": ratio,
    }
    path = config.output / RESULTS
    make_directory(config.output)
    write_json(
        path, {"config": {k: str(v) for k, v in vars(config).items()}, "packages": package_versions(), **numbers}
    )
    console = Console(highlight=False)
    console.print(f"data responses, {config.batch_size} at a time: {rates[0]:,.0f} tokens per CPU second")
    console.print(f"transformers generate, prompt by prompt: {rates[1]:,.0f} tokens per CPU second")
    console.print(
        f"[bold]{ratio:.2f}x[/bold], {len(prompts)} prompts, {equal} answers equal, greedy, float32, "
        f"{config.num_threads} thread(s), median of {config.repeats} interleaved runs"
    )
    return path


def timed(make: Callable[[Sequence[list[int]]], Answers], prompts: Sequence[list[int]]) -> tuple[Answers, float]:
    """The answers, and the CPU seconds that this process spent on them."""
    with torch.inference_mode():
        started = time.process_time()
        answers = make(prompts)
        return answers, time.process_time() - started
