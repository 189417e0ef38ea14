"""The decoder's loop for several sequences at once: chains only, and one transfer to the host a round.

Each row is decoded as if it were alone: its drafts, its lengths, its random numbers and its counts do not depend on the
rows beside it. `loop.generate` is the same for one sequence and for trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.decoding.chains import BatchDrafter, BatchOutcome, Chains, to_device, verify_chains
from draftsmith.modules.decoding.loop import Answer, Generation, room_for
from draftsmith.modules.decoding.trace import DecodeStep
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.targets.base import RowsLM, RowsSession
from draftsmith.modules.types import SamplingParams

# With fixed shapes the target reads chains padded to a multiple of this, so that few widths occur.
WIDTH_BUCKET = 4


@torch.inference_mode()
def generate_batch(
    target: RowsLM,
    drafter: BatchDrafter | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    seeds: Sequence[int],
    eos_ids: Sequence[int] | None = None,
    session: RowsSession | None = None,
    max_nodes: int = 128,
) -> list[Generation]:
    """`loop.generate` of every prompt, together: the same greedy tokens and counts, and when sampling the same law.

    seeds: one a prompt; a row's random numbers are its seed's whatever the batch.
    session: one of the target's to use again, for the graphs that it holds; None makes one.
    Other arguments and the errors are those of `loop.generate`.
    """
    ends = frozenset(target.info.eos_ids if eos_ids is None else eos_ids)
    longest_chain = 0 if drafter is None else min(drafter.max_drafted, max_nodes)
    every = [
        _Row(number, prompt, seed, ends, room_for(prompt, max_new_tokens, target.info), longest_chain)
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    longest = max(row.num_prompt + row.room for row in every)
    session = session or target.rows_session(len(every), longest)
    assert session.batch >= len(every) and session.capacity >= longest
    batch = _Batch(every, session, drafter, params, target, longest_chain)
    with batch.naming():
        batch.prefill(prompts)
    while batch.drop_done():
        with batch.naming():
            batch.round()
    return [Generation(row.tokens, row.trace, row.ended) for row in every]


class _Row(Answer):
    """One sequence: its answer so far, and its own random numbers."""

    def __init__(
        self, number: int, prompt: Sequence[int], seed: int, ends: frozenset[int], room: int, longest_chain: int
    ):
        """number: of the prompt, from 0."""
        super().__init__(ends, room)
        self.number = number
        self.num_prompt = len(prompt)
        self._generator = torch.Generator().manual_seed(seed)
        self._num_uniforms = 2 * longest_chain + 1

    @property
    def num_read(self) -> int:
        """Tokens that the target has read: all but the last."""
        return self.num_prompt + len(self.tokens) - 1

    def uniforms(self) -> Tensor:
        """A round's: one for each token of the longest draft, one for its acceptance, one for the target's own token.
        As many every round, so that the next round's do not depend on what this one used."""
        return torch.rand(self._num_uniforms, generator=self._generator, dtype=torch.float64)

    def take(self, emitted: list[int], num_accepted: int, num_drafted: int) -> None:
        """The end of a round. A chain costs one forward of the drafter a token."""
        appended = self.emit(emitted)
        self.trace.steps.append(DecodeStep(num_drafted, num_accepted, len(appended), num_drafted))


class _Batch:
    """The rows that are decoded together, in the order of the session's."""

    def __init__(
        self,
        rows: list[_Row],
        session: RowsSession,
        drafter: BatchDrafter | None,
        params: SamplingParams,
        target: RowsLM,
        longest_chain: int,
    ):
        self._rows, self._session, self._drafter, self._params = rows, session, drafter, params
        self._limit, self._device, self._longest_chain = target.info.max_position, target.device, longest_chain

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts, each without padding, and emit every row's first token."""
        scores = [self._session.prefill(row, prompt) for row, prompt in enumerate(prompts)]
        logits = torch.stack([score.logits for score in scores])
        none = torch.zeros(len(scores), 0, dtype=torch.int64, device=self._device)
        _, first = verify_chains(none, none.sum(1), None, logits, self._params, self._uniforms()[:, -1:])
        first_tokens = first.tolist()
        if NO_TOKEN in first_tokens:
            raise NonFinite(row=first_tokens.index(NO_TOKEN))
        for row, token in zip(self._rows, first_tokens, strict=True):
            row.trace.prefill_emitted = 1
            row.emit([token])
        if self._drafter is not None:
            self._drafter.start(prompts, [score.features for score in scores], first_tokens)

    def drop_done(self) -> bool:
        """Let rows leave whose answers are complete; false when none is left. Where shapes are to recur they idle along
        until half of the batch is done."""
        kept = [i for i, row in enumerate(self._rows) if not row.done]
        idle = self._session.static and 2 * len(kept) > len(self._rows)
        if 0 < len(kept) < len(self._rows) and not idle:
            index = torch.tensor(kept)
            self._session.select(index)
            if self._drafter is not None:
                self._drafter.select(index)
            self._rows = [self._rows[i] for i in kept]
        return len(kept) > 0

    def round(self) -> None:
        """Draft, score, verify; what each row emits is the only thing that the host waits for."""
        rows = self._rows
        read = [row.num_read for row in rows]
        root = self._upload([[row.tokens[-1]] for row in rows])
        uniforms = self._uniforms()
        chains = self._draft(root, uniforms)
        count = chains.tokens.shape[1]
        padding = self._width(count) - count
        drafted = chains.tokens.clamp_min(0)  # what stands for no token can not be read
        fed = F.pad(torch.cat([root, drafted], 1), (0, padding))
        end = max(read) + fed.shape[1]
        logits, features = self._session.extend(fed, self._upload(read), end, num_logits=fed.shape[1])
        num_accepted, own = verify_chains(
            drafted,
            self._upload(chains.num_drafted),
            chains.draft_prob,
            logits[:, : count + 1],
            self._params,
            torch.cat([uniforms[:, self._longest_chain :][:, :count], uniforms[:, -1:]], 1),
        )
        brought = torch.cat([num_accepted[:, None], own[:, None], chains.tokens], 1).tolist()
        self._check(brought, chains.num_drafted)
        emitted = [[*draft[:accepted], max(own_token, 0)] for accepted, own_token, *draft in brought]
        tokens = F.pad(drafted, (0, padding + 1)).scatter(1, num_accepted[:, None], own.clamp_min(0)[:, None])
        for row, row_tokens, num_drafted in zip(rows, emitted, chains.num_drafted, strict=True):
            if not row.done:
                row.take(row_tokens, len(row_tokens) - 1, num_drafted)
        if self._drafter is not None:
            done = [row.done for row in rows]
            self._drafter.advance(BatchOutcome(emitted, tokens, num_accepted, features, done))

    def _check(self, brought: Sequence[Sequence[int]], num_drafted: Sequence[int]) -> None:
        """Of rows whose answer is complete nothing is looked at.

        Raises:
            NonFinite: a drafted token, or the target's own, is none.
        """
        for i, (row, (accepted, own, *draft), count) in enumerate(zip(self._rows, brought, num_drafted, strict=True)):
            if row.done:
                continue
            if NO_TOKEN in draft[:count]:
                raise NonFinite(position=draft.index(NO_TOKEN), row=i)
            if own == NO_TOKEN:
                raise NonFinite(model="target", position=accepted, row=i)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of a row tell where it stands, and which prompt it is of; of a round, the drafter's unless another
        model is named."""
        try:
            yield
        except NonFinite as error:
            row = self._rows[error.row or 0]
            model = self._drafter.model if self._drafter is not None and row.tokens else "target"
            error.row = row.number
            raise error.passed(model, row.num_read + 1) from None

    def _draft(self, root: Tensor, uniforms: Tensor) -> Chains:
        """The round's chains, as long as `loop.generate` allows each row's to be; a row that is done has none."""
        limits = [
            0 if row.done else min(row.room - len(row.tokens) - 1, self._limit - row.num_read - 1, self._longest_chain)
            for row in self._rows
        ]
        found = None
        if self._drafter is not None and max(limits) > 0:
            found = self._drafter.propose(limits, self._params, uniforms[:, : self._longest_chain])
        return found or Chains(root[:, :0], [0] * len(root), None)

    def _width(self, count: int) -> int:
        """Drafted tokens that the target is fed where the longest chain has `count`."""
        if not self._session.static:
            return count
        return min(-(-count // WIDTH_BUCKET) * WIDTH_BUCKET, self._longest_chain)

    def _uniforms(self) -> Tensor:
        """[B, U] of this round; [B, 0] where nothing is drawn."""
        if self._params.greedy:
            return torch.empty(len(self._rows), 0, device=self._device)
        return torch.stack([row.uniforms() for row in self._rows]).to(self._device)

    def _upload(self, values: list) -> Tensor:
        return to_device(values, self._device)
