"""Warnings about context length at the end of a training, from rounds that validation computes anyway."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import LossOutput
from draftsmith.train.data import MicroBatch

# Lengths that rounds are compared below and beyond.
EDGES = 2.0 ** np.arange(8, 21)
# Warn if the tokens per round beyond one are certainly less than this fraction of those below.
LEAST_BEYOND = 0.9
# On each side of it: fewer do not give an interval.
LEAST_TEXTS, LEAST_ROUNDS = 8, 100
# Say that longer contexts are untested if the target reads texts so many times as long as the longest row.
MANY_TIMES = 8


def rounds_of(output: LossOutput, batch: MicroBatch) -> Tensor:
    """Return text, tokens of context, and tokens of each round of a validation batch, [M, 3]."""
    if output.rounds is None:
        return torch.zeros(0, 3, dtype=torch.float64, device=output.loss.device)
    (places, tokens), data = output.rounds, batch.data
    lengths = torch.tensor(data.lengths or [data.input_ids.shape[1]] * len(data.input_ids))
    numbers = torch.tensor([key.index for key in batch.keys]).repeat_interleave(lengths)  # [B * T]
    columns = to_device(numbers, places.device)[places], data.position_ids.flatten()[places] + 1, tokens
    return torch.stack([column.double() for column in columns], -1)


def fall_by_length(rounds: np.ndarray) -> tuple[int, float, float, float] | None:
    """Return the length beyond which tokens per round certainly fall by more than a tenth, and where the fall is
    clearest: the length, tokens per round below and beyond it, and the highest ratio of these in the 95 % interval.

    The interval is that of a ratio of sums over texts, linearized: rounds of a text are alike, and a text counts on
    both sides.

    rounds: [M, 3], text, tokens of context, and tokens of each.
    """
    _, texts = np.unique(rounds[:, 0], return_inverse=True)
    found: tuple[int, float, float, float] | None = None
    clearest = 0.0
    for edge in EDGES:
        sides = [rounds[:, 1] < edge, rounds[:, 1] >= edge]
        (short, short_rounds), (long, long_rounds) = (
            (np.bincount(texts, side * rounds[:, 2]), np.bincount(texts, side)) for side in sides
        )  # [texts] each
        counts = np.array([short_rounds.sum(), long_rounds.sum()])
        if (
            min(np.count_nonzero(short_rounds), np.count_nonzero(long_rounds)) < LEAST_TEXTS
            or min(counts) < LEAST_ROUNDS
        ):
            continue
        below, beyond = short.sum() / counts[0], long.sum() / counts[1]
        parts = (long - beyond * long_rounds) / long.sum() - (short - below * short_rounds) / short.sum()
        highest = beyond / below * math.exp(1.96 * math.sqrt(len(parts) / (len(parts) - 1) * (parts**2).sum()))
        apart = (below - beyond) ** 2 / (1 / counts).sum()
        if highest < LEAST_BEYOND and apart > clearest:
            clearest, found = apart, (int(edge), float(below), float(beyond), highest)
    return found


def length_warning(rounds: np.ndarray, longest: int, context: int, window: int | None) -> str:
    """Warn if drafts fall short at length, or if texts as long as the target reads were never seen; else "".

    rounds: see `fall_by_length`. longest: tokens of the longest row trained on. context: of the target. window: of the
    head; 0: none, None: it cannot have one.
    """
    longer = "Train on longer rows (--max-length)" + (", or with --window N" if window == 0 else "")
    if (fall := fall_by_length(rounds)) is not None:
        edge, below, beyond, highest = fall
        return (
            f"warning: tokens per round fall from {below:.2f} below {edge:,} tokens of context to {beyond:.2f} beyond, "
            f"to {highest:.0%} at best (greedy drafts of validation texts). {longer}"
        )
    if context >= MANY_TIMES * longest and not window:
        return (
            f"note: the longest row has {longest:,} tokens and the target reads {context:,}: drafts in longer contexts "
            f"are untested (a bench of data prompts --length measures them). {longer}"
        )
    return ""
