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

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ModelInfo:
    """Sizes and identity of a language model.

    identity: `config` and `lm_head` content hashes, and `layers` captured; what artefacts made with it record.
    eos_ids: tokens that end an answer; kept in the output.
    path: the directory that it was loaded from; none of a model that was built.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position: int
    eos_ids: tuple[int, ...]
    identity: dict[str, str]
    path: str = ""


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises:
    InputError: a token that the model has no embedding for: its tokenizer has more tokens than it.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        remedy = "Use the model's own tokenizer, or resize its embeddings."
        raise InputError("tokens", f"id {wrong}", f"ids below {vocab_size}, the model's vocabulary", remedy)


def check_capture(capture: Sequence[int], num_layers: int) -> None:
    """Raises:
    InputError: layers that the model has not, or that are not ascending.
    """
    if capture and (list(capture) != sorted(set(capture)) or not 0 <= capture[0] <= capture[-1] <= num_layers):
        expected = f"ascending numbers from 0 to {num_layers}, the target's layers"
        raise InputError("capture", tuple(capture), expected, "Pass the target that the head was trained for.")


@dataclass(frozen=True)
class Scores:
    """One call's result, of B rows that were fed up to n tokens each.

    logits: of each row's LAST `num_logits` fed tokens: each scores what follows its token. features: entry i of a row
    is the state once its fed token i was read: F is H, or L*H where layers are captured. Where a row was fed fewer
    tokens, what it has comes first, and what follows means nothing.
    """

    logits: Tensor  # [B, num_logits, V]
    features: Tensor  # [B, n, F]


class Session(Protocol):
    """Rows being read side by side, each a sequence of its own: a cache of `lengths[b]` kept tokens.

    capture: as of `CausalLM.session`. static: shapes recur from call to call (CUDA graphs), so that callers had rather
    feed rows nothing than drop them; scores are then good until the next call on CUDA.
    joins: rows may begin while others go on.
    """

    capture: tuple[int, ...]
    static: bool
    joins: bool

    @property
    def lengths(self) -> Sequence[int]:
        """Kept tokens of each row."""

    def reset(self, rows: int) -> None:
        """Forget everything; go on with so many empty rows, at most as many as the session was made for."""

    def begin(self, row: int) -> None:
        """Forget this row alone, or go on with one more, which is empty: the one behind those in use."""

    def prefill(self, rows: Sequence[int], tokens: Rows) -> Scores:
        """`begin` these rows and read their tokens, 1 or more each: the scores of these rows alone, with the logits of
        their last tokens. Where rows do not join, they are all that go on."""

    def extend(
        self, tokens: Rows | Tensor, parents: Sequence[Sequence[int]] | None = None, num_logits: int = 1
    ) -> Scores:
        """Read each row's tokens after its kept ones, as chains, or as trees when `parents` is given.

        tokens: of any number a row, none too; or int64 [B, n] on the device, the same number for each.
        parents: for every token; parents[b][i] < i is the fed token that token i follows, -1 for the last kept token.
        A token sees the kept tokens, its ancestors and itself; its position is the row's length + its depth.
        """

    def step(self, tokens: Rows | Tensor) -> tuple[Tensor, Tensor]:
        """`extend` by one token a row, or none: logits [B, V], features [B, F], which mean nothing of rows fed none."""

    def graft(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Read T tokens, int64 [T], anywhere in what is cached; their features [T, F]. Of a session of one row that is
        not static.

        They take the slots behind the `length` ones in use, which they make T more, until `keep` drops them. positions:
        [length + T] of all slots, the new ones last. visible: [T, length + T] bool, which slots each token sees, itself
        among them.
        """

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        """Keep of each row the first so many tokens, then the cached tokens at `slots` (ascending, >= its length); drop
        the rest."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order: place i gets one that is not before it."""


class CausalLM(Protocol):
    """A language model: the lean Llama (`targets/llama.py`) or any transformers model (`targets/hf.py`).

    packed: weights are in the layout of the CPU's kernels where that helps (`modules.packed`); a head that drafts for
        this model does as it does.
    """

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    packed: bool

    def session(self, rows: int, capacity: int, capture: tuple[int, ...] = (), static: bool | None = None) -> Session:
        """An empty session for at most `rows` rows of at most `capacity` cached tokens each, drafts included.

        capture: what features are. (): the state after the final norm. Else the residual stream's states after the
        first so many layers, ascending, side by side, the last one of them the state after the final norm: (2, 16,
            29) are those that EAGLE-3 reads of 32 layers, and (2, 16, 29, 32) what it learns from.
        static: shapes are to recur; None takes them on CUDA only.
        """

    def features(self, input_ids: Tensor, position_ids: Tensor | None = None, capture: tuple[int, ...] = ()) -> Tensor:
        """Teacher forcing: features [B, T, F] of right-padded input_ids [B, T], causal; capture as of `session`."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [..., H]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states after the final norm."""
