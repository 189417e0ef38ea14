"""Scores of drafted tokens by repetitions of the text, as features of acceptance predictors.

Edits, summaries and code copy, and a draft's own probability does not tell when the target copies. As in prompt lookup,
the longest suffix that occurred before is searched, and the drafted token is compared with the token that followed it.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.modules.decoding.stop import DraftView

# Placeholder for a token: no suffix is repeated.
NONE = -1


class RepeatIndex:
    """Index of a growing text: the token after the last occurrence of each suffix."""

    # Lengths of suffixes, longest first; more of them improve predictions little.
    SIZES = (8, 4, 2)

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start another text."""
        # Shortest first, so that the search can stop at the first miss.
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in reversed(self.SIZES)}
        self._num_read, self._before = 0, tuple[int, ...]()

    def begin_draft(self, text: Sequence[int]) -> None:
        """Add the tokens of the text so far that were not read before, and begin a draft behind them."""
        for end in range(self._num_read, len(text)):
            for size, followers in self._followers.items():
                if end >= size:
                    followers[tuple(text[end - size : end])] = text[end]
        self._num_read = max(self._num_read, len(text))
        self._before = tuple(text[-self.SIZES[0] :])

    def score_next(self, token: int) -> float:
        """Append a token to the draft and return its score.

        That is half the length of the longest repeated suffix before it, negated if another token followed that suffix
        in the text; 0 if none is repeated.
        """
        half, expected = 0.0, NONE
        for size, followers in self._followers.items():
            follower = followers.get(self._before[-size:])
            # A longer suffix cannot occur either.
            if follower is None:
                break
            half, expected = size / 2, follower
        self._before = (*self._before[1 - self.SIZES[0] :], token)
        return half if expected == token else -half

    def score(self, view: DraftView) -> float:
        """Return `score_next` of a view's token, for predictors that are shown every token of a draft in order."""
        if view.num_drafted == 1:
            self.begin_draft(view.context)
        return self.score_next(view.token)
