"""Time of training steps, measured alike in both trainers."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import torch


class StepClock:
    """Process CPU seconds and tokens of each step of a training; on a GPU seconds on the wall, its work waited for.

    A step reaches from the end of the one before to its own: it reads its batch, computes, and updates the weights.
    Starts, validations and saves count for none.
    """

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._since = 0.0

    def start(self) -> None:
        """Start the next step here."""
        self._since = self.now()

    def now(self) -> float:
        if not self.on_gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, tokens: int) -> None:
        """End a step of so many tokens."""
        now = self.now()
        self.seconds.append(now - self._since)
        self.tokens.append(tokens)
        self._since = now

    def write(self, path: Path) -> None:
        """Write the steps, and the most memory that the process held, on a GPU that of its tensors there."""
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if self.on_gpu:
            peak_mb = torch.cuda.max_memory_allocated() / 1e6
        path.write_text(json.dumps({"seconds": self.seconds, "tokens": self.tokens, "peak_mb": peak_mb}))
