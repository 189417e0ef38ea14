"""`python benchmarks/generation.py`: what batching is worth when the target answers the prompts of a data set.

The baseline is what people write first: transformers' `generate`, one prompt after the other.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from draftsmith.benchmarks.latency import paired_ratio
from draftsmith.data.engines.own import generate_all, set_threads
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import HFRunner, load_hf_model
from draftsmith.eval.clock import clock_of, interleaved
from draftsmith.eval.settings import PromptChoice
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import package_versions
from draftsmith.modules.types import SamplingParams, check_range

GENERATION = "generation.json"


@dataclass(frozen=True)
class GenerationConfig(PromptChoice):
    """Measures `data responses` (in process) against transformers' generate, prompt by prompt: greedy, CPU time.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artifact, a data set, or embedded:prompts.
        output: directory that receives generation.json.
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
    limit: int = 64
    max_new_tokens: int = 256
    batch_size: int = 32
    engine: Literal["auto", "lean", "hf"] = "auto"
    num_threads: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        check_range("limit", self.limit, 0)
        for name in ("max_new_tokens", "batch_size", "num_threads", "repeats"):
            check_range(name, getattr(self, name), 1)


@sole_writer()
def run(config: GenerationConfig) -> Path:
    """Measure, print the ratio, write generation.json; return its path."""
    set_threads(config.num_threads)
    rows = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    prompts = [row.prompt_ids for row in rows]
    lm = load_lm(config.target, engine=config.engine, packed=True)
    hf = HFRunner(load_hf_model(config.target, "float32", "cpu"), SamplingParams(), lm.info.eos_ids)

    answers: dict[str, list[list[int]]] = {}

    def batched() -> None:
        answers["ours"] = generate_all(lm, prompts, SamplingParams(), config.max_new_tokens, config.batch_size)

    def one_by_one() -> None:
        made = hf(prompts, config.max_new_tokens, [0] * len(prompts))
        answers["theirs"] = [generation.tokens for generation in made]

    calls: dict[str, Callable[[], None]] = {"ours": batched, "theirs": one_by_one}
    with torch.inference_mode():
        seconds = interleaved(calls, config.repeats, clock_of("cpu", 1))
    ours, theirs = answers["ours"], answers["theirs"]
    tokens = {name: sum(map(len, found)) for name, found in answers.items()}
    rates = [statistics.median(tokens[name] / each for each in seconds[name]) for name in ("ours", "theirs")]
    ratio = paired_ratio(seconds["theirs"], seconds["ours"]) * tokens["ours"] / tokens["theirs"]
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    numbers = {
        "prompts": len(prompts),
        "tokens": tokens["ours"],
        "equal_answers": equal,
        "tokens_per_cpu_s": rates[0],
        "baseline_tokens_per_cpu_s": rates[1],
        "ratio": ratio,
    }
    path = config.output / GENERATION
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


if __name__ == "__main__":
    sys.exit(main_of(GenerationConfig, run))
