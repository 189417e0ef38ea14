"""What the decoder, the data stages and the heads need of a language model, whatever runs it.

One protocol serves targets and draft models: both read tokens into a cache, give distributions and hidden states, and
drop what was not kept. A target scores a tree of drafted tokens in one call; a chain is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class ModelInfo:
    """Sizes and identity of a language model.

    identity: `config` and `lm_head` content hashes, and `layers` captured; what artefacts made with it record.
    eos_ids: tokens that end an answer; kept in the output.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position: int
    eos_ids: tuple[int, ...]
    identity: dict[str, str]


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises:
    InputError: a token that the model has no embedding for: its tokenizer has more tokens than it.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        remedy = "Use the model's own tokenizer, or resize its embeddings."
        raise InputError("tokens", f"id {wrong}", f"ids below {vocab_size}, the model's vocabulary", remedy)


@dataclass(frozen=True)
class Scores:
    """One call's result. Row i of `features` is the hidden state after the final norm once fed token i was read;
    `logits` are those of the LAST `num_logits` fed tokens: each row scores what follows its token."""

    logits: Tensor  # [num_logits, V]
    features: Tensor  # [T, H]


class Session(Protocol):
    """One sequence being read: a cache of `length` kept tokens."""

    @property
    def length(self) -> int:
        """Kept tokens."""

    def extend(self, tokens: Sequence[int], parents: Sequence[int] | None = None, num_logits: int = 1) -> Scores:
        """Read T tokens after the kept ones, as a chain, or as a tree when `parents` is given.

        parents: [T]; parents[i] < i is the fed token that token i follows, -1 for the last kept token. A token sees
        the kept tokens, its ancestors and itself; its position is `length` + its depth.
        """

    def graft(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Read T tokens, int64 [T], anywhere in what is cached; their features [T, H].

        They take the slots behind the `length` ones in use, which they make T more, until `keep` drops them. positions:
        [length + T] of all slots, the new ones last. visible: [T, length + T] bool, which slots each token sees, itself
        among them.
        """

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        """Keep the first `length` tokens, then the cached tokens at `slots` (ascending, >= length); drop the rest."""


class BatchSession(Protocol):
    """Several sequences generated together, one token each a step."""

    def step(self, tokens: Tensor) -> Tensor:
        """Read tokens [B], one a row; logits [B, V] of what follows."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (indices [B'])."""


class RowsSession(Protocol):
    """Several sequences read side by side, each of its own length, which the caller keeps account of.

    static: shapes are to recur from call to call (CUDA graphs), so callers pad rather than shrink.
    """

    batch: int
    capacity: int
    static: bool

    def prefill(self, row: int, prompt: Sequence[int]) -> Scores:
        """Read a prompt of T tokens into this row from its beginning; logits [1, V] after it, features [T, H]."""

    def extend(self, tokens: Tensor, starts: Tensor, end: int, num_logits: int = 1) -> tuple[Tensor, Tensor]:
        """Read n tokens a row, tokens [B, n], as a chain after each row's first starts[b] tokens, both int64.

        end: the longest row's start + n, known to the host. Rows may be padded at the right. Nothing is kept: the next
        call's `starts` say how much of this one stands. Logits [B, num_logits, V] of the last tokens, features
        [B, n, H] after the final norm; on CUDA both are good until the next call.
        """

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (ascending indices [B'])."""


class CausalLM(Protocol):
    """A language model: the lean Llama (`targets/llama.py`) or any transformers model (`targets/hf.py`).

    packed: weights are in the layout of the CPU's kernels where that helps (`modules.packed`); a head that drafts for
        this model does as it does.
    """

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    packed: bool

    def session(self, capacity: int) -> Session:
        """An empty session for at most `capacity` cached tokens, drafts included."""

    def batch_session(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[BatchSession, Tensor]:
        """Read prompts of any lengths; the session, and logits [B, V] of each prompt's next token.

        capacity: most tokens a row may reach, prompt included.
        """

    def features(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Teacher forcing: hidden states after the final norm [B, T, H] of right-padded input_ids [B, T], causal."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [..., H]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states after the final norm."""


class RowsLM(CausalLM, Protocol):
    """A language model that can also read rows of different lengths side by side."""

    def rows_session(self, batch: int, capacity: int, static: bool | None = None) -> RowsSession:
        """At most `batch` rows of at most `capacity` tokens, drafts included. static: None decides by the device."""
