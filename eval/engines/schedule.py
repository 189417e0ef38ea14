"""Draft length by requests at once, chosen from what was measured, in the forms that servers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.costs import interpolate

KRange = tuple[int, int, int]  # first and last number of requests, and K


def best_lengths(seconds: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Return the fastest K for 1 to the most requests that were measured, the smallest of equal ones.

    seconds: K -> requests at once -> seconds of a token of one request. Between measured numbers of requests they are
    interpolated.
    """
    most = max(max(curve) for curve in seconds.values())
    loads = range(1, most + 1)
    return [min(sorted(seconds), key=lambda k: interpolate(seconds[k], load)) for load in loads]


def ranges(lengths: Sequence[int]) -> list[KRange]:
    """Merge equal neighbors: K for 1 to B requests -> (first, last, K)."""
    merged: list[KRange] = []
    for size, k in enumerate(lengths, start=1):
        if merged and merged[-1][2] == k:
            merged[-1] = (merged[-1][0], size, k)
        else:
            merged.append((size, size, k))
    return merged


def vllm_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return a part of vLLM's --speculative-config (0.32, 0.33); above the last range its K holds."""
    longest = max(k for _, _, k in k_ranges)
    by_batch = [list(each) for each in k_ranges]
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": by_batch}


def sglang_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return SGLang's --speculative-adaptive-config (0.5.23): the smallest batch size -> the allowed steps.

    With a single candidate SGLang's acceptance rates change nothing.
    """
    return {str(first): {"candidate_steps": [k]} for first, _, k in k_ranges}
