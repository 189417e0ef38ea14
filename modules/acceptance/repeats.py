"""Does a drafted token go on with a repetition of the text? Edits, summaries and code copy; where the target copies, a
draft's own probability does not know it, and a look into the text does.

As prompt lookup does, the longest suffix of the text that stood in it before is found, and what followed it then; here
nothing is drafted from it: the draft's token is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftView


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

    def score(self, before: tuple[int, ...], token: int) -> float:
        """Half the length of the longest repeated suffix of `before` (the text's last tokens, and drafted ones), where
        `token` followed it in the text too, and minus that where another token did; 0 where none is repeated."""
        score = 0.0
        for size, followers in self._followers.items():
            expected = followers.get(before[-size:])
            if expected is None:  # where a suffix did not stand in the text, no longer one did
                break
            score = size / 2 if expected == token else -size / 2
        return score


class RepeatScores:
    """`Repeats.score` of drafted tokens, as a stop policy is shown them."""

    def __init__(self) -> None:
        self._repeats, self._before = Repeats(), tuple[int, ...]()
        self._last: DraftView | None = None
        self._value = 0.0

    def reset(self) -> None:
        """A new prompt begins."""
        self._repeats.clear()

    def score(self, view: DraftView) -> float:
        """Score of the token shown, to whoever asks; every token of a draft is to be shown, from the first."""
        if view is self._last:
            return self._value
        if view.num_drafted == 1:
            self._repeats.read(view.context)
            self._before = tuple(view.context[-Repeats.SIZES[0] :])
        before, token = self._before, view.token
        self._last, self._value = view, self._repeats.score(before, token)
        self._before = (*before[1 - Repeats.SIZES[0] :], token)
        return self._value


def repeat_scores(text: Sequence[int], starts: Sequence[int], drafted: Tensor) -> Tensor:
    """[S, K] float32: `Repeats.score` of drafts [S, K] that follow the first starts[s] tokens of a text, starts
    ascending. Tokens below 0 (no draft) have 0."""
    repeats, scores = Repeats(), []
    for start, tokens in zip(starts, drafted.tolist(), strict=True):
        repeats.read(text[:start])
        before = tuple(text[max(start - Repeats.SIZES[0], 0) : start])
        own = []
        for token in tokens:
            own.append(repeats.score(before, token) if token >= 0 else 0.0)
            before = (*before[1 - Repeats.SIZES[0] :], token)
        scores.append(own)
    return torch.tensor(scores, dtype=torch.float32).view(drafted.shape)
