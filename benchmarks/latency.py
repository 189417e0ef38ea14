"""`python benchmarks/latency.py --output DIR`: what the decoder itself costs, in ratios.

Every ratio is taken in one process, interleaved, as a median of paired runs; on a CPU with one thread and process CPU
time. The models are random ones of a real size (`benchmarks/synthetic.py`) and the embedded pair. What a head is worth
is for `draftsmith eval bench` to say: this is about the time that the decoder adds to its models' forwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from draftsmith.benchmarks.decoder_cost import (
    Number,
    dispatch_time,
    fixed_shapes,
    ideals,
    long_context,
    overheads,
    trace_cost,
)
from draftsmith.benchmarks.pairs import GREEDY, K, Pair, embedded_models, paired_ratio, random_models
from draftsmith.data.console import log_note, markdown_lines, print_table, table_from_cells
from draftsmith.data.models.loading import DTYPES, check_device
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.manifest import git_commit, package_versions, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.hf_baseline import HFRunner
from draftsmith.eval.bench.results import hardware
from draftsmith.eval.bench.runner import EngineRunner, Runner
from draftsmith.eval.clock import clock_of, interleaved
from draftsmith.launch.cli import main_of
from draftsmith.modules.engine.lean import can_pack
from draftsmith.modules.types import InputError, at_least

HEADINGS = ("what", "models", "value", "aim")


@dataclass(frozen=True)
class LatencyConfig:
    """Measures the decoder's own cost against transformers and against the sum of its forwards.

    Attributes:
        output: directory that receives latency.json and latency.md.
        device: cpu, cuda, cuda:1, ...
        shape: of the random pair: 88m, llama-3-8b (16 GB in bfloat16; for a GPU), or tiny (computes next to nothing).
        dtypes: float32, bfloat16 or both, separated by a comma.
        embedded: measure the embedded pair too (float32, CPU).
        long_context: tokens of the long prompt; 0 leaves it out.
        new_tokens: answers' length.
        repeats: paired runs of which the median counts.
    """

    output: Path = field(kw_only=True)
    device: str = "cpu"
    shape: Literal["88m", "llama-3-8b", "tiny"] = "88m"
    dtypes: str = "float32,bfloat16"
    embedded: bool = True
    long_context: int = 4000
    new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        for name, smallest in (("new_tokens", 4 * K), ("repeats", 1), ("long_context", 0)):
            at_least(name, getattr(self, name), smallest)
        for dtype in self.dtypes.split(","):
            if dtype not in DTYPES:
                raise InputError("dtypes", dtype, "float32, bfloat16 or both", "Correct it.")
        check_device(self.device)


def end_to_end(pair: Pair, repeats: int) -> Iterator[Number]:
    """Tokens per second against transformers' `generate`, with the same weights, prompts and number of tokens."""
    hf_target, hf_draft = pair.load_hf()
    plain = pair.load(False)
    runners: dict[str, Runner] = {
        "hf": HFRunner(hf_target, GREEDY, ()),
        "hf-assisted": HFRunner(hf_target, GREEDY, (), hf_draft, K),
        "ar": EngineRunner(pair.packed[0], None, GREEDY, ()),
        "spec": pair.chain(pair.packed, GREEDY),
        "ar, plain": EngineRunner(plain[0], None, GREEDY, ()),
        "spec, plain": pair.chain(plain, GREEDY),
    }
    with torch.inference_mode():
        seconds = interleaved({name: pair.answer(run) for name, run in runners.items()}, repeats, pair.clock)
    assisted = f"transformers' assisted generation, K={K}"
    yield Number("ar / transformers' generate", pair.name, paired_ratio(seconds["hf"], seconds["ar"]), "x", ">= 1.6")
    faster = paired_ratio(seconds["hf-assisted"], seconds["spec"])
    yield Number(f"spec:k={K} / {assisted}", pair.name, faster, "x", ">= 1.9" if "bfloat16" in pair.name else ">= 2.0")
    faster = paired_ratio(seconds["hf-assisted"], seconds["spec, plain"])
    yield Number(f"the same without packed kernels / {assisted}", pair.name, faster, "x", ">= 1.1")
    for method in ("ar", "spec"):
        faster = paired_ratio(seconds[f"{method}, plain"], seconds[method])
        yield Number(f"{method} with packed kernels / without", pair.name, faster, "x")
    yield Number(f"{assisted} / its generate", pair.name, paired_ratio(seconds["hf"], seconds["hf-assisted"]), "x")


def measure_all(config: LatencyConfig) -> Iterator[Number]:
    clock = clock_of(config.device, 1)
    on_cpu = torch.device(config.device).type == "cpu"
    yield from dispatch_time(config.repeats, config.device, clock)
    if config.embedded and on_cpu:
        pair = embedded_models(config.new_tokens, clock)
        yield from end_to_end(pair, config.repeats)
        yield from overheads(pair, config.repeats)
        yield from ideals(pair, config.repeats)
        yield from trace_cost(pair, config.repeats)
    for dtype in config.dtypes.split(","):
        pair = random_models(config.shape, dtype, config.device, config.new_tokens, clock)
        yield from fixed_shapes(pair, config.repeats)
        yield from ideals(pair, config.repeats)
        if on_cpu:
            yield from trace_cost(pair, config.repeats)
            yield from end_to_end(pair, config.repeats)
            yield from overheads(pair, config.repeats)
            if config.long_context and dtype == "float32":
                yield from long_context(pair, config.long_context, min(config.repeats, 2))  # reading it takes long


@sole_writer()
def run(config: LatencyConfig) -> Path:
    """Measure, print every row as it comes, write latency.json and latency.md; returns the directory."""
    torch.set_num_threads(1)
    rows = []
    for row in measure_all(config):
        rows.append(row)
        log_note(" | ".join(row.cells))
    print_table(table_from_cells("latency", HEADINGS, [row.cells for row in rows], right=HEADINGS[2:]))
    make_directory(config.output)
    meta = {
        "settings": resolved(config),
        "hardware": hardware(config.device),
        "packed": {dtype: can_pack(DTYPES[dtype]) for dtype in config.dtypes.split(",")},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_text(config.output / "latency.md", "\n".join(markdown_lines(HEADINGS, [row.cells for row in rows])) + "\n")
    write_json(config.output / "latency.json", {"meta": meta, "rows": [asdict(row) for row in rows]})
    return config.output


if __name__ == "__main__":
    sys.exit(main_of(LatencyConfig, run))
