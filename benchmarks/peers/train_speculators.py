"""`speculators train ...` 0.9.0 on one CPU thread, with its steps timed: arguments RECORD.json HEAD OPTIONS.

Its environment's Python runs this. HEAD receives the trained weights in float32; its own checkpoints are bfloat16. It
was written for accelerators: what is replaced below where there is none asks for one, and computes nothing.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import speculators.train.checkpointer
import speculators.train.cli
import speculators.train.trainer
import torch
from speculators.train.config import TrainConfig
from torch.optim import _muon

from draftsmith.benchmarks.peers.clock import StepClock


class TimedTrainer(speculators.train.trainer.Trainer):
    """Its trainer, which gives the steps to a clock and saves the head."""

    clock: StepClock
    head: Path
    config: Any

    def train_epoch(self, epoch: int, *, step_callback: Any = None) -> None:
        self.clock.start()
        super().train_epoch(epoch, step_callback=lambda: self.clock.step(self.model.num_tokens))

    def run_training(self) -> None:
        # Behind --max-steps it takes one more step in every epoch that is left.
        epochs = math.ceil(self.config.max_steps / len(self.train_loader))
        self.config = self.config._replace(num_epochs=epochs)
        forward = self.model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.model.num_tokens = int((kwargs["document_ids"] != -1).sum())
            return forward(*args, **kwargs)

        self.model.forward = counted
        super().run_training()
        del self.model.forward
        self.model.float().save_pretrained(self.head)


def in_float32(grad: torch.Tensor, ns_coefficients: Any, ns_steps: int, eps: float) -> torch.Tensor:
    """Return Muon's update of a gradient, by the same iteration with the same coefficients.

    Without bf16 instructions its own, in bfloat16, takes most of a step.
    """
    a, b, c = ns_coefficients
    wide = grad.shape[0] <= grad.shape[1]
    x = grad if wide else grad.mT
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def main(record: Path, head: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        speculators.train.trainer.get_local_rank = lambda: torch.device("cpu")
        speculators.train.checkpointer.get_current_device = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
        _muon._zeropower_via_newtonschulz = in_float32
    TimedTrainer.clock, TimedTrainer.head = StepClock(), head
    speculators.train.cli.Trainer = TimedTrainer
    speculators.train.cli.main(TrainConfig.resolve(words))
    TimedTrainer.clock.write(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
