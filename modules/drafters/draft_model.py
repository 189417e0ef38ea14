"""A small language model drafts chains (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.stop import StopPolicy
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class DraftModelDrafter(RowDrafter):
    """Drafter that reads emitted tokens into its own cache and drafts until the stop policies end the chains.

    One token is unread after a rejection, and two after a fully accepted draft, whose last token was never fed. They go
    into one forward with the first draft step, so no call is spent on catching up.
    """

    needs_features = False
    model = "draft"

    def __init__(self, lm: CausalLM, stops: Sequence[StopPolicy], capacity: int, static: bool | None = None):
        """stops: a policy for each row. capacity: most tokens of a row, drafts included. static: see
        `CausalLM.session`."""
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        super().__init__(stops, longest_text=lm.info.max_position + 1)
        self._session = lm.session(len(self.stops), min(capacity, lm.info.max_position), static=static)

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        super().begin(row, prompt, torch.empty(0), first_token)
        self._session.begin(row)

    def _draft(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        unread: list[list[int]] = []
        for row, limit in zip(self._rows, limits, strict=True):
            unread.append(row.tokens[row.read :] if limit > 0 else [])
            row.read += len(unread[-1])
        scores = self._session.extend(unread)

        # Each row's state after its last unread token, [B, H]; undefined for rows that read nothing.
        states, counts = scores.features, [len(own) for own in unread]  # [B, n, H]
        if min(counts) == states.shape[1]:
            last = states[:, -1]
        else:
            places = torch.tensor([max(count, 1) - 1 for count in counts], device=states.device)
            last = states[torch.arange(len(counts), device=states.device), places]
        return self._chains(scores.logits[:, 0], last, self._session.step, limits, params, sources)

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, outcome in zip(self._rows, outcomes, strict=True):
            if outcome is not None:
                # All drafted tokens but the last were read while drafting.
                row.read += max(0, min(outcome.num_accepted, len(row.tree.tokens) - 1))
        super().advance(outcomes)
        self._session.keep([row.read for row in self._rows])

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._session.select(rows)

    def rewind(self, row: int, length: int) -> None:
        """Truncate a row to its first `length` tokens."""
        del self._rows[row].tokens[length:]
        self._rows[row].read = min(self._rows[row].read, length)
        self._session.keep([own.read for own in self._rows])
