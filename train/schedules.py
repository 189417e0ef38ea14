"""Learning rate over the steps of a run, as a share of its peak."""

from __future__ import annotations

import math
from collections.abc import Callable


def lr_schedule(name: str, total_steps: int, warmup_share: float, min_lr_share: float) -> Callable[[int], float]:
    """Share of the peak learning rate at step 0, 1, ..., total_steps - 1.

    Warm-up rises linearly and reaches 1 at the step after its last; then cosine or linear falls to `min_lr_share`,
    reached right after the last step; hold stays for half of the rest before it falls linearly; constant stays.
    """
    warmup = round(total_steps * warmup_share)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        shapes = {
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - progress,
            "hold": min(1.0, 2 * (1 - progress)),
            "constant": 1.0,
        }
        falling = shapes[name]
        return min_lr_share + (1 - min_lr_share) * falling

    return share
