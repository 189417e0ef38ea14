"""Boundary types of the core, and the legend of shapes.

B sequences, T positions, H hidden size, V vocabulary, L captured layers, K drafted tokens, N nodes of a draft tree.
p is the target's next-token distribution and q the draft's, both AFTER temperature, top-k and top-p.

The command line's errors are from here too, so torch is not imported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class InputError(ValueError):
    """Bad input from a user, as one line: what is wrong, what was found, what was expected and the remedy.

    The command line prints it and exits with code 2; any other exception is a defect and shows its traceback.
    """

    def __init__(self, field: str, found: object, expected: str, remedy: str):
        super().__init__(without_passwords(f"{field}: found {found}, expected {expected}. {remedy}"))
        self.field = field


def without_passwords(text: str) -> str:
    """Hide the user and password of every address in a text."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", text)


@dataclass(frozen=True)
class SamplingParams:
    """How logits become a distribution; p and q always share it.

    temperature: 0 is greedy: all mass on the argmax (lowest index on ties).
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError("temperature", self.temperature, "0 (greedy) or more", "Pass a finite number.")
        if self.top_k < 0:
            raise InputError("top_k", self.top_k, "0 (off) or more", "Pass a non-negative integer.")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "a number in (0, 1]", "Pass 1 to switch it off.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class FeatureBatch:
    """Target features of whole sequences, unshifted: row t holds token x_t and the target's feature f_t.

    lengths: of the documents that are laid end to end in one row [1, N] (modules/packing.py); None: a sequence a row.
    """

    input_ids: Tensor  #: [B, T] int64
    features: Tensor | None  #: [B, T, L*H]; None until the target has read the batch
    loss_mask: Tensor  #: [B, T] bool, true where x_t is a response token
    position_ids: Tensor  #: [B, T] int64, from 0 in every sequence
    attention_mask: Tensor | None = None  #: [B, T] bool, false on padding (which is at the right)
    lengths: tuple[int, ...] | None = None
    scale: Tensor | None = None  #: [B, T] of features in fp8, which are decoded on their device


@dataclass(frozen=True)
class AcceptanceBatch:
    """Inputs and labels of the acceptance head, aligned: row t describes drafted token y_t (DESIGN: e_t, P_t)."""

    hidden: Tensor  # [B, T, H] the drafter's last hidden state once it has read z_t, or the one that predicted it
    accept_prob: Tensor  # [B, T] float32 in [0, 1]
    loss_mask: Tensor  # [B, T] bool, true where z_t is a drafted token y_t
    weight: Tensor | None = None  # [B, T] float32, how much each token counts; None: all alike
    embeds: Tensor | None = None  # [B, T, H] embeddings of the tokens, for a head that reads the state before them
    features: Tensor | None = None  # [B, T, F] numbers of the distribution that each was drawn from


@dataclass(frozen=True)
class LossOutput:
    """A loss to back-propagate, and what is needed to average it over ranks: sums and counts, never means."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


def at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise InputError(name, value, f"{smallest} or more", "Raise it.")


def at_most(name: str, value: int, largest: int) -> None:
    if value > largest:
        raise InputError(name, value, f"{largest} or less", "Lower it.")


def between(name: str, value: float, low: float, high: float) -> None:
    """`value` lies strictly between."""
    if not low < value < high:
        raise InputError(name, value, f"a number between {low} and {high}", "Correct it.")
