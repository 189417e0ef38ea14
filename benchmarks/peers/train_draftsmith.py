"""`draftsmith train KIND ...` on one CPU thread, with its steps timed: arguments RECORD.json KIND OPTIONS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from draftsmith.benchmarks.papers.drafters import register
from draftsmith.benchmarks.peers.clock import StepClock
from draftsmith.launch.commands import configure
from draftsmith.train.fit import fit
from draftsmith.train.prepare import prepare


class Timed(pl.Callback):
    """Callback that gives the steps to a clock."""

    def __init__(self, clock: StepClock):
        self.clock = clock

    def on_train_start(self, *_: Any) -> None:
        self.clock.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.step(sum(sum(part.real_lengths) for part in batch))


def main(record: Path, kind: str, words: list[str]) -> None:
    torch.set_num_threads(1)
    register()
    _, config = configure(f"train {kind}", words)
    assert config is not None  # only of words that ask for help
    clock = StepClock()
    fit(*prepare(config), (Timed(clock),))
    clock.write(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
