"""Chains of several sequences at once: drawing them and judging them, without a word to the host where none is needed.

B rows, K drafted tokens of the longest chain. `verify.py` and `chain.py` do the same for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import DraftView, StopPolicy
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import best_tokens, draw_rows, probabilities, residual
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Chains:
    """B drafted chains, padded at the right.

    tokens: NO_TOKEN where the drafter's numbers chose none.
    num_drafted: [B], known to the host: the first so many tokens of a row are its draft.
    draft_prob: [B, K, V], the law each token was drawn from; None when greedy.
    """

    tokens: Tensor  # [B, K] int64
    num_drafted: list[int]
    draft_prob: Tensor | None


@dataclass(frozen=True)
class BatchOutcome:
    """A round of B rows as their drafter learns of it.

    emitted: per row its accepted tokens, then the target's own.
    tokens: the same padded at the right, int64 [B, n], n > K. num_accepted: int64 [B].
    features: [B, n, H] of the root and the drafted tokens: row i predicts the sequence's i-th emitted token, and the
        rows past its last mean nothing. They are good until the target's next call.
    done: whose answer is complete, by this round or before: their policies do not hear of it (`Drafter.advance`).
    """

    emitted: list[list[int]]
    tokens: Tensor
    num_accepted: Tensor
    features: Tensor
    done: list[bool]


class BatchDrafter(Protocol):
    """Proposes chains for several sequences at a time; each row is drafted as if it were alone.

    max_drafted: longest chain it ever proposes. model: the flag of what drafts, for errors.
    """

    max_drafted: int
    model: str

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        """New sequences: prompts of T tokens, the target's features [T, H] of each, and the first tokens emitted."""

    def propose(self, limits: Sequence[int], params: SamplingParams, uniforms: Tensor) -> Chains | None:
        """At most limits[b] tokens for row b; None where no row drafts any. uniforms: [B, max_drafted] in [0, 1)."""

    def advance(self, outcome: BatchOutcome) -> None:
        """After every round; rows whose answer is complete are in it too."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (ascending indices [B'])."""


def reset_policies(stops: Sequence[StopPolicy], count: int) -> list[StopPolicy]:
    """The policies of the first `count` rows, for new sequences."""
    own = list(stops[:count])
    for stop in own:
        stop.reset()
    return own


def to_device(values: Sequence, device: torch.device) -> Tensor:
    """Integers of the host as int64, without waiting for what the device is doing."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def draft_chains(
    logits: Tensor,
    hidden: Tensor,
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    stops: Sequence[StopPolicy],
    limits: Sequence[int],
    params: SamplingParams,
    uniforms: Tensor,
    contexts: Sequence[Sequence[int]],
) -> Chains:
    """`draft_chain` of every row: until the row's own policy says so, at most limits[b] tokens; some limit is positive.

    logits [B, V], hidden [B, H]: of the forward that read the last emitted tokens.
    step(j, tokens): read each row's j-th drafted token, j from 0, int64 [B]; logits [B, V] and hidden [B, H].
    contexts: each row's tokens before its draft.
    Rows that have stopped are drafted on with the others, and what is drafted is padding. Chains of fixed lengths are
    drawn without the host's knowing a token; other policies are shown each one, which costs a transfer.

    Raises:
        NonFinite: where a policy is shown tokens: a row's logits, or what its policy reads.
    """
    fixed = all(isinstance(stop, FixedLength) for stop in stops)
    ends = [min(stop.max_drafted, limit) for stop, limit in zip(stops, limits, strict=True)]
    for stop, end in zip(stops, ends, strict=True):
        if end > 0:
            stop.start_round()
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    while True:
        if params.greedy:
            drawn = best_tokens(logits)
        else:
            laws.append(probabilities(logits, params))
            drawn = draw_rows(laws[-1], uniforms[:, len(tokens)])
        tokens.append(drawn)
        if not fixed:
            count = len(tokens)
            for row, token in enumerate(drawn.tolist()):
                if count > ends[row]:
                    continue
                law = laws[-1][row] if laws else None
                view = DraftView(
                    count, token, hidden[row : row + 1], logits[row], law, params.temperature, contexts[row]
                )
                if _stops(stops[row], view, row):
                    ends[row] = count
        if len(tokens) >= max(ends):
            break
        logits, hidden = step(len(tokens) - 1, drawn.clamp_min(0))
    return Chains(torch.stack(tokens, 1), [max(end, 0) for end in ends], torch.stack(laws, 1) if laws else None)


def _stops(stop: StopPolicy, view: DraftView, row: int) -> bool:
    """`should_stop`; raises NonFinite of this row."""
    if view.token == NO_TOKEN:
        raise NonFinite(position=view.num_drafted - 1, row=row)
    try:
        return stop.should_stop(view)
    except NonFinite as error:
        error.row = row
        raise error.passed(offset=view.num_drafted) from None


def verify_chains(
    tokens: Tensor,
    num_drafted: Tensor,
    draft_prob: Tensor | None,
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """`verify` of B chains at once: how many tokens of each are accepted, and the target's own, NO_TOKEN where its
    numbers choose none; both int64 [B].

    tokens [B, K], num_drafted [B] <= K, draft_prob [B, K, V] (None when greedy), logits [B, K+1, V] of the target: row
    i scores token i, the row after the last drafted token what follows. Rows past that one are not looked at.
    uniforms: [B, K+1] in [0, 1): one for each drafted token's acceptance, the last for the target's own token.

    Greedy: the longest prefix that is the target's own. Sampling: token i is accepted when u_i < p/q, else it is
    replaced by a draw from norm((p - q)+) (Leviathan et al. 2023, algorithm 1).
    """
    count = tokens.shape[1]
    drafted = torch.arange(count, device=tokens.device) < num_drafted[:, None]
    if params.greedy:
        choices = best_tokens(logits)
        num_accepted = _num_leading(drafted & (choices[:, :count] == tokens))
        return num_accepted, choices.gather(1, num_accepted[:, None])[:, 0]
    target_prob = probabilities(logits, params)
    if count == 0:
        return torch.zeros_like(num_drafted), draw_rows(target_prob[:, 0], uniforms[:, 0])
    assert draft_prob is not None
    p, q = (law[:, :count].gather(-1, tokens[..., None])[..., 0].double() for law in (target_prob, draft_prob))
    num_accepted = _num_leading(drafted & (uniforms[:, :count] * q < p))
    law = _at(target_prob, num_accepted)
    replaced = residual(law, _at(draft_prob, num_accepted.clamp_max(count - 1)))
    law = torch.where((num_accepted < num_drafted)[:, None], replaced, law)
    return num_accepted, draw_rows(law, uniforms[:, count])


def _num_leading(flags: Tensor) -> Tensor:
    """Flags that are true before the first false one: bool [B, K] -> int64 [B]."""
    return flags.long().cumprod(1).sum(1)


def _at(laws: Tensor, index: Tensor) -> Tensor:
    """laws [B, K, V] at index [B] -> [B, V]."""
    return laws[torch.arange(len(index), device=index.device), index]
