"""Does a drafted token go on with a repetition of the text? Edits, summaries and code copy; where the target copies, a
draft's own probability does not know it, and a look into the text does.

As prompt lookup does, the longest suffix of the text that stood in it before is found, and what followed it then; here
nothing is drafted from it: the draft's token is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.modules.decoding.confidence import draft_distribution
from draftsmith.modules.decoding.protocols import DraftView

Number = TypeVar("Number", float, Tensor)
NONE = -1  # in the place of a token


class Repeats:
    """What followed the suffixes of a growing text when they last stood in it before."""

    # Lengths of suffixes, longest first: more of them say little more.
    SIZES = (8, 4, 2)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Another text."""
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in reversed(self.SIZES)}
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """The text so far, which begins with what was read before."""
        for end in range(self._num_read, len(tokens)):
            for size, followers in self._followers.items():
                if end >= size:
                    followers[tuple(tokens[end - size : end])] = tokens[end]
        self._num_read = max(self._num_read, len(tokens))

    def follower(self, before: tuple[int, ...]) -> tuple[float, int]:
        """Half the length of the longest repeated suffix of `before` (the text's last tokens, and drafted ones), and
        the token that followed it in the text; 0 and `NONE` where none is repeated."""
        found = 0.0, NONE
        for size, followers in self._followers.items():
            expected = followers.get(before[-size:])
            if expected is None:  # where a suffix did not stand in the text, no longer one did
                break
            found = size / 2, expected
        return found


class RepeatScores:
    """How drafted tokens go on with repetitions, as a stop policy is shown them, to whoever asks; every token of a
    draft is to be shown, from the first."""

    def __init__(self) -> None:
        self._repeats, self._before = Repeats(), tuple[int, ...]()
        self._last: tuple[DraftView | None, float, int] = None, 0.0, NONE

    def reset(self) -> None:
        """A new prompt begins."""
        self._repeats.clear()

    def score(self, view: DraftView) -> float:
        """Half the length of the longest repeated suffix of what stands before the token, where the token followed it
        in the text too, and minus that where another did; 0 where none is repeated."""
        half, expected = self._follower(view)
        return half if expected == view.token else -half

    def mean(self, view: DraftView) -> float:
        """Mean of the score over what the draft may draw there: it does not look at the token."""
        half, expected = self._follower(view)
        return mean_score(half, draft_distribution(view)[expected].item()) if half else 0.0

    def _follower(self, view: DraftView) -> tuple[float, int]:
        if view is not self._last[0]:
            if view.num_drafted == 1:
                self._repeats.read(view.context)
                self._before = tuple(view.context[-Repeats.SIZES[0] :])
            self._last = view, *self._repeats.follower(self._before)
            self._before = (*self._before[1 - Repeats.SIZES[0] :], view.token)
        return self._last[1:]


def mean_score(half: Number, q: Number) -> Number:
    """`half` with probability q, else minus that."""
    return half * (2 * q - 1)


def followers(text: Sequence[int], starts: Sequence[int], drafted: Tensor) -> tuple[Tensor, Tensor]:
    """`Repeats.follower` of the tokens of drafts [S, K] that follow the first starts[s] tokens of a text, starts
    ascending: [S, K] float32 and int64. Tokens below 0 (no draft) have none."""
    repeats, halves, expected = Repeats(), list[float](), list[int]()
    for start, tokens in zip(starts, drafted.tolist(), strict=True):
        repeats.read(text[:start])
        before = tuple(text[max(start - Repeats.SIZES[0], 0) : start])
        for token in tokens:
            half, follower = repeats.follower(before) if token >= 0 else (0.0, NONE)
            halves.append(half)
            expected.append(follower)
            before = (*before[1 - Repeats.SIZES[0] :], token)
    found = torch.tensor(halves, dtype=torch.float32), torch.tensor(expected, dtype=torch.int64)
    return found[0].view(drafted.shape), found[1].view(drafted.shape)


def repeat_scores(halves: Tensor, expected: Tensor, drafted: Tensor) -> Tensor:
    """`RepeatScores.score` of drafted tokens, by their `followers`."""
    return torch.where(expected == drafted, halves, -halves)
