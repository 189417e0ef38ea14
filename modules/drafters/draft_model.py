"""A small language model drafts chains (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.decoding.branches import BranchedText
from draftsmith.modules.decoding.growth import Level
from draftsmith.modules.drafters.net import DraftNet, RowState
from draftsmith.modules.targets.base import CausalLM


class DraftModelNet(DraftNet):
    """Reads emitted tokens into the model's own cache, where accepted drafts stay.

    One token is unread after a rejection, and two after a fully accepted draft, whose last token was never fed. They go
    into one forward with the first draft step, so no call is spent on catching up.
    """

    drafts_trees = reads_features = False
    first_start = 1

    def __init__(self, lm: CausalLM):
        super().__init__("draft", lm.device, lm.embed)
        self._lm = lm
        self._read = list[int]()  # tokens of each row's text that are in the cache
        self._text: BranchedText | None = None

    # -- rows

    def allocate(self, rows: int, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        most = self._lm.info.max_position
        self.longest_text = most + 1
        self._session = self._lm.session(rows, min(capacity, most), static=static)

    def begin(self, row: int) -> None:
        self._read[row : row + 1] = [0]
        self._session.begin(row)

    def select(self, rows: Sequence[int]) -> None:
        self._read = [self._read[row] for row in rows]
        self._session.select(rows)

    def start(self, rows: Sequence[RowState], limits: Sequence[int]) -> Level:
        unread: list[list[int]] = []
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            unread.append(row.tokens[self._read[place] :] if limit > 0 else [])
            self._read[place] += len(unread[-1])
        scores = self._session.extend(unread)

        # Each row's state after its last unread token; undefined for rows that read nothing.
        states, counts = scores.features, [len(own) for own in unread]  # [B, n, H]
        if min(counts) == states.shape[1]:
            return Level(states[:, -1:], scores.logits)
        places = torch.tensor([max(count, 1) - 1 for count in counts], device=states.device)
        return Level(states[torch.arange(len(counts), device=states.device), places][:, None], scores.logits)

    def step(self, tokens: list[list[int]] | Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self._session.step(tokens)

    def finish(self, accepted: Sequence[int]) -> None:
        self._read = [read + more for read, more in zip(self._read, accepted, strict=True)]
        self._session.keep(self._read)

    def rewind(self, row: int, length: int) -> None:
        self._read[row] = min(self._read[row], length)
        self._session.keep(self._read)

    # -- branches

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        self._text = self._text or BranchedText(self._lm, depth)
        self._text.open(tokens)

    def branch(self, starts: Tensor) -> Tensor:
        assert self._text is not None, "open a text first"
        self._starts = starts
        return self._text.features[starts.to(self.device) - self.first_start]

    def read(self, tokens: Any, parents: Tensor | None, depth: int) -> Tensor:
        assert self._text is not None, "open a text first"
        return self._text.level(self._starts, depth - 1, tokens)

    def read_drafts(self, tokens: Tensor) -> Tensor:
        # Unlike a drafter that reads its own states, a language model reads whole branches at once.
        return self.read(tokens, None, 1)

    def logits(self, hidden: Tensor, depth: int | Tensor) -> Tensor:
        return self._lm.lm_head(hidden)

    def drop(self) -> None:
        assert self._text is not None, "open a text first"
        self._text.drop()
