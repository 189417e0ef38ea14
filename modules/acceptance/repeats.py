"""Scores of drafted tokens by repetitions of the text, as features of acceptance predictors.

Edits, summaries and code copy, and a draft's own probability does not tell when the target copies. As in prompt lookup,
the longest suffix that occurred before is searched, and the drafted token is compared with the token that followed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftView

# Placeholder for a token: no suffix is repeated.
NONE = -1


class Repeats:
    """Index of a growing text: the token after the last occurrence of each suffix."""

    # Lengths of suffixes, longest first; more of them improve predictions little.
    SIZES = (8, 4, 2)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start another text."""
        # Shortest first, so that the search can stop at the first miss.
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in reversed(self.SIZES)}
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Add the tokens of the text so far that were not read before."""
        for end in range(self._num_read, len(tokens)):
            for size, followers in self._followers.items():
                if end >= size:
                    followers[tuple(tokens[end - size : end])] = tokens[end]
        self._num_read = max(self._num_read, len(tokens))

    def follower(self, before: tuple[int, ...]) -> tuple[float, int]:
        """Return half the length of the longest repeated suffix of `before` (the text's last tokens and drafted ones),
        and the token that followed it in the text; 0 and NONE if none is repeated."""
        longest = 0.0, NONE
        for size, followers in self._followers.items():
            expected = followers.get(before[-size:])
            # A longer suffix cannot occur either.
            if expected is None:
                break
            longest = size / 2, expected
        return longest


class RepeatScores:
    """Scores of drafted tokens, for predictors that are shown every token of a draft in order."""

    def __init__(self) -> None:
        self._repeats, self._before = Repeats(), tuple[int, ...]()

    def reset(self) -> None:
        """Start a new prompt."""
        self._repeats.clear()

    def score(self, view: DraftView) -> float:
        """Return half the length of the longest repeated suffix before the token, negated if another token followed it
        in the text; 0 if none is repeated."""
        if view.num_drafted == 1:
            self._repeats.read(view.context)
            self._before = tuple(view.context[-Repeats.SIZES[0] :])
        half, expected = self._repeats.follower(self._before)
        # The next token follows this one.
        self._before = (*self._before[1 - Repeats.SIZES[0] :], view.token)
        return half if expected == view.token else -half


def followers(text: Sequence[int], starts: Sequence[int], drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Repeats.follower` of drafts [S, K] that follow the first starts[s] tokens of a text: [S, K] float32 and
    int64. starts: ascending. Tokens below 0 (no draft) have no follower."""
    repeats, halves, expected = Repeats(), list[float](), list[int]()
    for start, tokens in zip(starts, drafted.tolist(), strict=True):
        repeats.read(text[:start])
        before = tuple(text[max(start - Repeats.SIZES[0], 0) : start])
        for token in tokens:
            half, follower = repeats.follower(before) if token >= 0 else (0.0, NONE)
            halves.append(half)
            expected.append(follower)
            before = (*before[1 - Repeats.SIZES[0] :], token)
    shape = drafted.shape
    return torch.tensor(halves, dtype=torch.float32).view(shape), torch.tensor(expected, dtype=torch.int64).view(shape)


def repeat_scores(halves: Tensor, expected: Tensor, drafted: Tensor) -> Tensor:
    """Return `RepeatScores.score` of drafted tokens, from their `followers`."""
    return torch.where(expected == drafted, halves, -halves)
