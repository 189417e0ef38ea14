"""CPU time of training steps, measured alike in both trainers."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path


class StepClock:
    """Process CPU seconds and tokens of each step of a training.

    A step reaches from the end of the one before to its own: it reads its batch, computes, and updates the weights.
    Starts, validations and saves count for none.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._since = 0.0

    def start(self) -> None:
        """Start the next step here."""
        self._since = time.process_time()

    def step(self, tokens: int) -> None:
        """End a step of so many tokens."""
        now = time.process_time()
        self.seconds.append(now - self._since)
        self.tokens.append(tokens)
        self._since = now

    def write(self, path: Path) -> None:
        """Write the steps, and the most memory that the process held."""
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        path.write_text(json.dumps({"seconds": self.seconds, "tokens": self.tokens, "peak_mb": peak_mb}))
