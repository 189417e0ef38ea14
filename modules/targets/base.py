"""Interface of a language model for the decoder, the data stages and the heads.

Targets and draft models share it: both read tokens into a cache, return logits and hidden states, and drop what was not
kept. A target scores a tree of drafted tokens in one call; a chain is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.engine.rows import Scores
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.targets.shape import TargetShape
from draftsmith.modules.types import InputError

Rows = Sequence[Sequence[int]]


class ModelFiles(Protocol):
    """Files of a model, opened once (`pretrained.checkpoint.Checkpoint`)."""

    @property
    def directory(self) -> object:
        """Path of the directory."""

    @property
    def shape(self) -> TargetShape:
        """Sizes, with the decoder layer of the model's heads."""


@dataclass(frozen=True)
class ModelInfo:
    """Sizes and identity of a language model.

    identity: content hashes of `config` and `lm_head`, and the captured `layers`, as recorded in artifacts.
    eos_ids: tokens that end an answer; kept in the output.
    files: those that the model was loaded from; None for a model that was built.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position: int
    eos_ids: tuple[int, ...]
    identity: dict[str, str]
    files: ModelFiles | None = field(default=None, compare=False, repr=False)

    @property
    def path(self) -> str:
        """Directory that the model was loaded from; empty for a model that was built."""
        return "" if self.files is None else str(self.files.directory)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for a token without an embedding: the tokenizer has more tokens than the model."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        remedy = "Use the model's own tokenizer, or resize its embeddings."
        raise InputError("tokens", f"id {wrong}", f"ids below {vocab_size}, the model's vocabulary", remedy)


def final_state(num_layers: int) -> int:
    """Return the number, among those of layers, of the state after the final norm: that after the last layer, which is
    not normed, is `num_layers`."""
    return num_layers + 1


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    """Raise InputError for states that the model does not have, or that are not ascending."""
    last = final_state(num_layers)
    if aux_layers and (list(aux_layers) != sorted(set(aux_layers)) or not 0 <= aux_layers[0] <= aux_layers[-1] <= last):
        expected = f"ascending numbers from 0 to {num_layers}, the target's layers, or {last}, after the final norm"
        raise InputError("aux_layers", tuple(aux_layers), expected, "Pass the target that the head was trained for.")


class Session(Protocol):
    """A sequence that is read in chains and trees, or rows that are answered side by side, each a sequence of its own.

    A row has `lengths[b]` kept tokens in a cache.

    aux_layers: see `CausalLM.session`. most_rows: one for a transformers model that reads no trees, however many were
        asked for.
    static: shapes recur from call to call (CUDA graphs), so that it is better to feed a row nothing than to drop it; on
        CUDA scores are then valid until the next call.
    """

    aux_layers: tuple[int, ...]
    static: bool
    most_rows: int

    @property
    def lengths(self) -> Sequence[int]:
        """Kept tokens of each row."""

    def reset(self, rows: int) -> None:
        """Clear everything and start with this many empty rows, at most as many as the session was made for."""

    def keep(self, lengths: Sequence[int], slots: Sequence[Sequence[int]] | None = None) -> None:
        """Keep the first lengths[b] tokens of each row, and of a single one the cached tokens at slots[0] (ascending);
        drop the rest."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order; no row may move backwards."""

    def prefill(self, rows: Sequence[int], prompts: Rows) -> Tensor:
        """Clear these rows, or append them behind those in use, and read their prompts.

        Returns the logits [R, V] of the last tokens.
        """

    def extend(
        self, tokens: Rows | Tensor, parents: Sequence[Sequence[int]] | None = None, logits_to_keep: int = 1
    ) -> Scores:
        """Read each row's tokens after its kept ones, as a chain, or as a tree if `parents` is given.

        tokens: of a single row any number; of several one or none each; or int64 [B, n] on the device.
        parents: parents[b][i] < i is the fed token that token i follows, -1 for the last kept token.
        A token sees the kept tokens, its ancestors and itself; its position is the row's length + its depth.
        """

    def step(self, tokens: Rows | Tensor) -> tuple[Tensor, Tensor]:
        """Read one token of each row, or none. Returns logits [B, V], features [B, F], undefined for rows with none."""

    def read_masked(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Read T tokens, int64 [T], anywhere in the cached text; returns their features [T, F].

        Only for a session of one row that is not static. The tokens take the slots behind the `length` in use, until
        `keep` drops them. positions: [length + T] of all slots, the new ones last. visible: [T, length + T] bool, the
        slots that each token sees, itself among them.
        """


class CausalLM(Protocol):
    """A language model: the lean Llama (`targets/llama.py`) or any transformers model (`targets/hf.py`).

    packed: weights are in the layout of the CPU's kernels where that helps (`engine.lean`); its draft heads do the
    same. readout: what follows the product with the output embedding.
    """

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    packed: bool
    readout: Readout

    def session(
        self, rows: int, capacity: int, aux_layers: tuple[int, ...] = (), static: bool | None = None
    ) -> Session:
        """Make an empty session for at most `rows` rows of at most `capacity` cached tokens each, drafts included.

        aux_layers: what features are. (): the state after the final norm. Else the states of the residual stream after
            the first so many layers, ascending, side by side; `final_state` stands for that after the final norm. Of 32
            layers EAGLE-3 reads (2, 16, 29), and learns from (2, 16, 29, 33).
        static: use fixed shapes; None: on CUDA only.
        """

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Compute features [B, T, F] of right-padded input_ids [B, T], causal (teacher forcing)."""

    def logits(self, input_ids: Tensor, keep: int) -> Tensor:
        """Compute logits [keep, V] of the last tokens of a text [T] as the model's answers are drawn, not by `features`
        and `lm_head`."""

    def embed(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        """Look tokens up in the embedding, int64 [...] or a list of ids: [..., H]. Read only: it may be a view.

        They are rows of the table, without a factor that the target itself has on them (Gemma, Granite): so servers
        give them to heads.
        """

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states after the final norm."""

    def lm_head_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return `lm_head` over some tokens [N] alone, of a model that is not packed."""

    def lm_head_weight(self) -> Tensor:
        """Return the output embedding [V, H], of a model that is not packed."""

    def fit_vocabulary(self, vocab_size: int) -> None:
        """Cut or pad a draft's logits to the target's vocabulary: models of one tokenizer pad their embeddings alike or
        not. Added tokens are read as a row of zeros and never drawn."""


def fit_logits(logits: Tensor, missing: int) -> Tensor:
    """Pad logits [..., V] with `missing` tokens that are never drawn, or cut them by as many if it is negative."""
    # Finite, so that no entropy is NaN; its exponential is 0 in every type.
    return F.pad(logits, (0, missing), value=-1e4) if missing else logits
