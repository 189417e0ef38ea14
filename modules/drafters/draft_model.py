"""A small language model drafts chains (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chains
from draftsmith.modules.decoding.protocols import NO_DRAFT, DraftTree, Outcome, StopPolicy
from draftsmith.modules.finite import blame
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class DraftModelDrafter:
    """Reads what was emitted into its own cache and drafts until the stop policies end the chains.

    Emitted tokens that it has not read are one after a rejection, and two after a fully accepted draft, whose last
    token was never fed. They go into one forward with the first draft step, so no call is spent on catching up.
    """

    capture: tuple[int, ...] = ()
    needs_features = False

    def __init__(self, lm: CausalLM, stops: Sequence[StopPolicy], capacity: int, static: bool | None = None):
        """stops: a policy for each row. capacity: most tokens a row may reach, drafts included. static: as of
        `CausalLM.session`."""
        self._lm, self.stops = lm, list(stops)
        self._session = lm.session(len(self.stops), min(capacity, lm.info.max_position), static=static)
        self._stops: list[StopPolicy] = []  # of the rows in use
        self._tokens: list[list[int]] = []  # each row's, committed, of which the session keeps the first `_read`
        self._read: list[int] = []
        self._num_drafted: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self._stops = self.stops[: len(prompts)]
        for stop in self._stops:
            stop.reset()
        self._session.reset(len(prompts))
        self._tokens = [[*prompt, token] for prompt, token in zip(prompts, first_tokens, strict=True)]
        self._read, self._num_drafted = [0] * len(prompts), [0] * len(prompts)

    @blame("draft")
    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        session = self._session
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        context = self._lm.info.max_position + 1
        limits = [min(limit, context - len(tokens)) for limit, tokens in zip(limits, self._tokens, strict=True)]
        self._num_drafted = [0] * len(limits)
        if max(limits) < 1:
            return [NO_DRAFT] * len(limits)
        unread: list[list[int]] = []
        for row, limit in enumerate(limits):
            tokens = self._tokens[row]
            unread.append(tokens[self._read[row] :] if limit > 0 else [])
            if limit > 0:
                self._read[row] = len(tokens)

        scores = session.extend(unread)
        states = last_of_each(scores.features, [len(own) for own in unread])
        trees = draft_chains(
            scores.logits[:, 0], states, session.step, self._stops, limits, params, sources, self._tokens
        )
        self._num_drafted = [len(tree.tokens) for tree in trees]
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            # All drafted tokens but the last were read while drafting.
            self._read[row] += max(0, min(outcome.num_accepted, self._num_drafted[row] - 1))
            self._tokens[row] += outcome.emitted
            self._stops[row].observe(self._num_drafted[row], outcome.num_accepted)
        self._num_drafted = [0] * len(outcomes)
        self._session.keep(self._read)

    def select(self, rows: Sequence[int]) -> None:
        self._session.select(rows)
        self._stops = [self._stops[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._read = [self._read[row] for row in rows]
        self._num_drafted = [self._num_drafted[row] for row in rows]

    def commit(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self._tokens[row] += tokens

    def rewind(self, row: int, length: int) -> None:
        del self._tokens[row][length:]
        self._read[row] = min(self._read[row], length)
        self._session.keep(self._read)


def last_of_each(states: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, H]: of states [B, n, H] each row's last, where it was fed so many tokens; any where it was fed none."""
    if min(counts) == states.shape[1]:
        return states[:, -1]
    last = torch.tensor([max(count, 1) - 1 for count in counts], device=states.device)
    return states[torch.arange(len(counts), device=states.device), last]
