"""Formulas in Python floats, written from their definitions; no code is shared with the product."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from draftsmith.modules.types import SamplingParams


def warped(logits: Tensor, params: SamplingParams) -> list[float]:
    """Return the distribution [V] of logits [V], token by token: divide by the temperature, cut after k with ties, cut
    where the mass reaches top_p."""
    scaled = (logits.double() / params.temperature).tolist()
    largest = max(scaled)
    probs = [math.exp(x - largest) for x in scaled]
    if params.top_k:
        boundary = sorted(probs, reverse=True)[: params.top_k][-1]
        probs = [p if p >= boundary else 0.0 for p in probs]
    total, kept, mass = sum(probs), set(), 0.0
    for i in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
        if mass >= params.top_p:
            break
        kept.add(i)
        mass += probs[i] / total
    total = sum(probs[i] for i in kept)
    return [p / total if i in kept else 0.0 for i, p in enumerate(probs)]


def repeated(text: Sequence[int], before: Sequence[int]) -> tuple[float, int | None]:
    """Search a text for the longest suffix of 8, 4 or 2 tokens of what stands before a token; return half its length,
    and the token that went on from its last occurrence."""
    for size in (8, 4, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if len(before) >= size and list(text[end - size : end]) == list(before[-size:]):
                return size / 2, text[end]
    return 0.0, None
