"""`python benchmarks/growth.py --output DIR`: what a rank of a training takes of its own to open a large data set.

One million responses are made up, with the lengths of dialogues, and opened by `train`'s own functions, up to some
steps' samples, in processes of their own: one that makes the file of columns, and some at once that find it there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftsmith.data.console import say
from draftsmith.data.responses import TEXT_FIELDS
from draftsmith.data.store.datasets import ArtefactDataset
from draftsmith.data.store.files import make_directory, write_table
from draftsmith.data.store.manifest import MANIFEST, FileEntry, Manifest, file_sha256, open_artefact
from draftsmith.launch.cli import main_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import order_of, train_and_val

ROWS_PER_SHARD = 8192
VOCAB = 32_000
HEADINGS = ("rank", "CPU s to open", "and to prepare", "own MB", "shared MB", "peak MB")


@dataclass(frozen=True)
class GrowthConfig:
    """How much is opened, and by how many.

    Attributes:
        output: Directory for the data set, which stays there, and the table.
        responses: How many; 205 tokens each, on average.
        ranks: Processes that open it at once.
        one: Only open it, in this process, and print what that took as JSON.
    """

    output: Path
    responses: int = 1_000_000
    ranks: int = 2
    one: bool = False


def run(config: GrowthConfig) -> None:
    data = config.output / f"responses-{config.responses}"
    if config.one:
        print(json.dumps(opened(data)))
        return
    if not (data / MANIFEST).exists():
        write_responses(data, config.responses)
    for leftover in data.glob(".columns-*"):
        leftover.unlink()
    command = [sys.executable, __file__, "--output", str(config.output), "--responses", str(config.responses), "--one"]
    taken = [measured([command])[0], *measured([command] * config.ranks)]
    names = ["the first one, alone", *(f"{number} of {config.ranks}" for number in range(1, config.ranks + 1))]
    table = [HEADINGS, ("---", *["---:"] * 5)]
    table += [(name, *(f"{value:,.1f}" for value in own.values())) for name, own in zip(names, taken, strict=True)]
    say("\n".join(f"| {' | '.join(row)} |" for row in table))


def measured(commands: list[list[str]]) -> list[dict[str, float]]:
    """What processes that run at once print last."""
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def opened(directory: Path) -> dict[str, float]:
    """CPU seconds, and those for what a training does before its first step and for reading a hundred; and megabytes
    that are this process' own, that it shares, and that it had at most, each beyond what it had before."""
    before, start = memory(), time.process_time()
    data = ArtefactDataset(directory, open_artefact(directory))
    opening = time.process_time() - start
    config = TrainConfig(data=directory, output=directory, batch_size=64)
    train, _ = train_and_val(config, data, None, 2048)
    order = order_of(config, train.lengths)
    for step in range(100):
        for sample in order.step(step)[1]:
            train.item(sample, 0)
    train.dataset.answer_lengths(train.indices)  # what there is to learn from, which a training says first
    return {
        "open": opening,
        "rest": time.process_time() - start - opening,
        **{name: (value - before[name]) / 1000 for name, value in memory().items()},
    }


def memory() -> dict[str, int]:
    """Kilobytes of this process: its own, mapped from files or otherwise shared, and at most so far."""
    names = ("smaps_rollup", "status")
    lines = [line for name in names for line in Path(f"/proc/self/{name}").read_text().splitlines() if "kB" in line]
    sizes = {line.split(":")[0]: int(line.split()[-2]) for line in lines}
    return {"own": sizes["Anonymous"], "shared": sizes["Rss"] - sizes["Anonymous"], "peak": sizes["VmHWM"]}


def write_responses(directory: Path, count: int) -> None:
    """A `responses` artefact of random tokens."""
    make_directory(directory)
    files = []
    for number, start in enumerate(range(0, count, ROWS_PER_SHARD)):
        path = directory / f"shard-{number:05d}.parquet"
        write_table(path, pa.table(dict(columns_of(start, min(start + ROWS_PER_SHARD, count)))))
        files.append(FileEntry(path.name, path.stat().st_size, file_sha256(path), min(ROWS_PER_SHARD, count - start)))
    manifest = Manifest("responses", fields=TEXT_FIELDS, counts={"rows": count}, files=tuple(files))
    manifest.write(directory)


def columns_of(start: int, stop: int) -> Iterator[tuple[str, pa.Array]]:
    """Rows [start, stop); a fifth of each is its prompt."""
    rng = np.random.default_rng(start)
    lengths = np.clip(rng.lognormal(np.log(160), 0.7, stop - start), 20, 1500).astype(np.int32)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    prompts = lengths // 5
    tokens = rng.integers(VOCAB, size=offsets[-1], dtype=np.int32)
    mask = np.arange(offsets[-1]) >= (offsets[:-1] + prompts).repeat(lengths)
    yield "id", pa.array([f"row-{row}" for row in range(start, stop)])
    yield "input_ids", pa.ListArray.from_arrays(offsets, tokens)
    yield "prompt_length", pa.array(prompts)
    yield "loss_mask", pa.ListArray.from_arrays(offsets, pa.array(mask))
    yield "turn", pa.array(np.ones(stop - start, dtype=np.int32))


if __name__ == "__main__":
    sys.exit(main_of(GrowthConfig, run))
