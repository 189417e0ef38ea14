"""Verdict on a finished training, in one sentence: would more steps have helped?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Fewer validations do not show a trend.
FEWEST = 3
# Relative changes below this one are noise: the next 16 held-out prompts move tau by about as much.
NOISE = 0.02
# Below this share of tau on held-out text of the training's own kind, other text is another matter.
ALIKE = 0.9


def verdict(metric: str, curve: Sequence[tuple[int, float]], larger_is_better: bool = True) -> str:
    """Judge a training by what the second half of its steps brought; an empty string if too few validations tell.

    curve: (step, value of the metric) of each validation, in order.
    """
    curve = [(step, value) for step, value in curve if step > 0 and np.isfinite(value)]
    if len(curve) < FEWEST:
        return ""
    sign = 1 if larger_is_better else -1
    last_step, last = curve[-1]
    best_step, best = max(curve, key=lambda point: sign * point[1])
    noise = NOISE * abs(last)
    if sign * (best - last) > noise:
        lost = f"{metric} went from {best:.3g} at step {best_step} to {last:.3g}"
        return f"overfits: {lost}, and best/ is of step {best_step}; more answers would help, more steps would not"
    steps, values = zip(*curve, strict=True)
    half = float(np.interp(last_step / 2, steps, values))
    if sign * (last - half) <= noise:
        change = f"{metric} {half:.3g} after half of the steps, {last:.3g} at the end"
        return f"settled: {change}; more steps on these answers would bring little"
    change = f"{metric} {half:.3g} after half of the steps, {last:.3g} at the end"
    return f"still learning: {change}; more steps would bring more, on new answers best"


def mismatch(metrics: Mapping[str, float]) -> str:
    """Warn if the head drafts general prompts much worse than held-out text of its training; else an empty string."""
    own, general = metrics.get("tau"), metrics.get("tau_general")
    if own is None or general is None or general >= ALIKE * own:
        return ""
    return (
        f"warning: tau is {own:.2f} on held-out text of the training's own kind and {general:.2f} on general prompts: "
        "what is served decides. Train on prompts like those (--tau-data measures on them)"
    )
