"""A small language model drafts a chain for each of several sequences (`draft_model.py` for one)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftsmith.modules.decoding.chains import BatchOutcome, Chains, draft_chains, reset_policies, to_device
from draftsmith.modules.decoding.protocols import StopPolicy
from draftsmith.modules.targets.base import RowsLM
from draftsmith.modules.types import SamplingParams


class BatchDraftModel:
    """Every round begins with one forward over the last TWO tokens of every row.

    Of a draft accepted whole the last token was never read, of others it was; reading two tokens serves both, and the
    shapes are the same in every round. Rows that drafted past their own end have read tokens that are written over.
    A row that may draft no more in one round never does again: its cache is left behind.
    """

    model = "draft"

    def __init__(self, lm: RowsLM, stops: Sequence[StopPolicy], capacity: int, static: bool | None = None):
        """stops: one policy for each row. capacity: most tokens a row may reach. static: as `rows_session` takes it."""
        self._lm, self.stops = lm, list(stops)
        self._session = lm.rows_session(len(stops), min(capacity, lm.info.max_position), static)
        self.max_drafted = max(stop.max_drafted for stop in stops)
        self._stops: list[StopPolicy] = []
        self._tokens: list[list[int]] = []  # each row's, committed
        self._num_drafted: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self._stops = reset_policies(self.stops, len(prompts))
        for row, prompt in enumerate(prompts):
            if 1 < len(prompt) <= self._session.capacity:  # a longer one leaves no room for drafts
                self._session.prefill(row, prompt[:-1])
        self._tokens = [[*prompt, token] for prompt, token in zip(prompts, first_tokens, strict=True)]
        self._num_drafted = [0] * len(prompts)

    def propose(self, limits: Sequence[int], params: SamplingParams, uniforms: Tensor) -> Chains | None:
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        context = self._lm.info.max_position
        lengths = [len(tokens) for tokens in self._tokens]
        limits = [min(limit, context - length + 1) for limit, length in zip(limits, lengths, strict=True)]
        self._num_drafted = [0] * len(limits)
        if max(limits) < 1:
            return None
        starts = to_device([length - 2 for length in lengths], self._lm.device)
        longest = max(lengths)

        def step(j: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            logits, hidden = self._session.extend(tokens[:, None], starts + (2 + j), longest + 1 + j)
            return logits[:, 0], hidden[:, 0]

        logits, hidden = self._session.extend(
            to_device([tokens[-2:] for tokens in self._tokens], self._lm.device), starts, longest
        )
        chains = draft_chains(logits[:, 0], hidden[:, -1], step, self._stops, limits, params, uniforms, self._tokens)
        self._num_drafted = chains.num_drafted
        return chains

    def advance(self, outcome: BatchOutcome) -> None:
        for row, emitted in enumerate(outcome.emitted):
            self._tokens[row] += emitted
            if not outcome.done[row]:
                self._stops[row].observe(self._num_drafted[row], len(emitted) - 1)

    def select(self, rows: Tensor) -> None:
        self._session.select(rows)
        kept = rows.tolist()
        self._stops = [self._stops[row] for row in kept]
        self._tokens = [self._tokens[row] for row in kept]
