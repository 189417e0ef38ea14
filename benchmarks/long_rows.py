"""Measure the memory of a training step by the length of its rows: `python benchmarks/long_rows.py --output DIR`.

Every case is a process of its own. Its peak is the resident memory of the first step above what the process has with
models and data loaded, on a CPU whose allocator gives freed tensors back at once (MALLOC_MMAP_THRESHOLD_). Rows are
random tokens, 0.6 of them in answers, and the target is the embedded one with a longer context: memory does not depend
on what the weights are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from draftsmith.benchmarks.measured import Measured, describe_run, report
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import check_config

PERIOD, PROMPT = 500, 200  # tokens of a turn, and those of them before its answer


@dataclass(frozen=True)
class LongRowsConfig:
    """Measures the memory of a training step by the length of its rows.

    Attributes:
        output: Directory that receives long-rows.json and long-rows.md.
        kinds: Heads to train, separated by commas.
        windows: Their windows, separated by commas; 0 is none.
        lengths: Tokens of a row, separated by commas.
        tokens: Tokens of a step.
        span_tokens: As of train.
        ttt_steps: Of EAGLE-3.
    """

    output: Path = field(kw_only=True)
    kinds: str = "eagle3,dspark"
    windows: str = "0,2048"
    lengths: str = "4096,32768"
    tokens: int = 32_768
    span_tokens: int = 16_384
    ttt_steps: int = 3

    def __post_init__(self) -> None:
        check_config(self, tokens=(16, 2**20), span_tokens=(0, 2**20), ttt_steps=(1, 16))


class Peak(pl.Callback):
    """Callback that reads this process's memory before and after a step, in bytes."""

    def on_train_batch_start(self, *_: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.base = resident("VmRSS")

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak = resident("VmHWM")


def resident(name: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def one_step(kind: str, window: int, length: int, config: LongRowsConfig) -> dict[str, int]:
    """Take a step and return memories in bytes: the peak, the peak above the start, and both as planned."""
    import draftsmith
    from draftsmith.train.plan import plan_of

    torch.set_num_threads(1)
    target, count = long_target(config.output / "target"), max(1, config.tokens // length)
    options = {"ttt_steps": config.ttt_steps, "draft_vocab": 0} if kind == "eagle3" else {}
    options |= {"window": window, "span_tokens": config.span_tokens, "tokens_per_batch": count * length}
    run: dict[str, Any] = {"max_steps": 1, "loggers": ("csv",), "tau_prompts": 0, "accelerator": "cpu"}
    run |= {
        "output": config.output / f"{kind}-{window}-{length}",
        "target": str(target),
        "data": config.output / "none",
    }
    shutil.rmtree(run["output"], ignore_errors=True)
    planned = {"plan_samples": max(2, count), "plan_length": length, "val": run["data"]}
    plan = plan_of(draftsmith.settings(kind, **options | run | planned))

    lm, settings = draftsmith.load_target(str(target)), draftsmith.settings(kind, **options | run)
    answers = torch.arange(length) % PERIOD >= PROMPT
    rows = [{"input_ids": torch.randint(lm.info.vocab_size, (length,)), "loss_mask": answers} for _ in range(count)]
    short, peak = [{name: values[:PERIOD] for name, values in rows[0].items()}], Peak()
    module = draftsmith.LitDrafter(draftsmith.new_head(settings, lm), lm, settings)
    draftsmith.fit(module, draftsmith.HeadDataModule(rows, short, settings), [peak])
    memory = plan.memories[plan.strategy]
    own = {"peak": peak.peak, "above": peak.peak - peak.base}
    return own | {"planned": memory["peak"], "planned above": memory["activations"] + memory["gradients"]}


def long_target(directory: Path) -> Path:
    """Write the embedded target with a context of 131,072 tokens, once."""
    if not directory.exists():
        shutil.copytree(resolve_model("embedded:target"), directory)
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2**17}))
    return directory


def numbers(config: LongRowsConfig) -> Iterator[Measured]:
    """Yield the memory of each case, and that of the longest rows over that of the shortest."""
    lengths = [int(length) for length in config.lengths.split(",")]
    long_target(config.output / "target")
    for kind in config.kinds.split(","):
        for window in map(int, config.windows.split(",")):
            name, above = f"{kind}, window {window or 'none'}", []
            for length in lengths:
                with multiprocessing.get_context("spawn").Pool(1) as process:
                    memory = process.apply(one_step, (kind, window, length, config))
                above.append(memory["above"])
                plan = f"planned {memory['planned'] / memory['peak']:.2f} of the process's"
                plan += f", {memory['planned above'] / memory['above']:.2f} of the step's"
                what = f"rows of {length:,} tokens ({plan})"
                yield Measured(what, memory["above"] / 1e6, "MB", models=name)
            yield Measured(
                f"{lengths[-1]:,} over {lengths[0]:,}", above[-1] / above[0], "x", "at most 1.3", models=name
            )


@sole_writer()
def run(config: LongRowsConfig) -> Path:
    """Measure, print and write the numbers; return the directory."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)  # of the processes of the cases
    return report(config, "long-rows", numbers(config), describe_run(config))


if __name__ == "__main__":
    sys.exit(main_of(LongRowsConfig, run))
