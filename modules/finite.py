"""Checks for NaN and infinity in what models return: a broken model raises an error instead of emitting tokens.

Sampling marks a row without a usable distribution with NO_TOKEN, at no extra cost: it reads the chosen number anyway.
Where tokens are used, NO_TOKEN raises `NonFinite`, and callers add what they know: the row, the model, the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from draftsmith.modules.types import InputError

# Stands for the token of a row whose numbers choose none.
NO_TOKEN = -1
# Prompts that an error message names at most.
MAX_NAMED = 5


class NonFinite(InputError):
    """A model returned NaN or infinity. (A logit of -inf is allowed: that token has no probability. But one must have.)

    what: the numbers, such as logits. model: flag of the model: target, draft, mid, acceptance, or a head's kind.
    position: of the token to be chosen or verified, from 0 at the beginning of the prompt; within a round, from 0 at
        the first token that it emits. None if unknown.
    row: number of the prompt; within a round, of the row in its batch.
    prompt: its id.
    """

    def __init__(
        self, what: str = "logits", model: str | None = None, position: int | None = 0, row: int | None = None
    ):
        super().__init__(what, "NaN or infinity", "finite numbers", "")
        self.what, self.model, self.position, self.row = what, model, position, row
        self.prompt: str | None = None

    def of(self, prompts: Sequence[str]) -> NonFinite:
        """Add the ids of the prompts among which the broken one is. Returns the error."""
        more = f" and {len(prompts) - MAX_NAMED} more" if len(prompts) > MAX_NAMED else ""
        self.prompt = ", ".join(prompts[:MAX_NAMED]) + more
        return self

    def __str__(self) -> str:
        place = "" if self.position is None else f" at position {self.position}"
        prompt = f" of prompt {self.prompt}" if self.prompt else ""
        return (
            f"{self.model or 'model'}: found NaN or infinite {self.what}{place}{prompt}, expected finite numbers. "
            "Its weights are damaged, or its dtype overflows: check its files, or pass --dtype float32."
        )


def checked(tokens: Tensor, what: str = "logits", model: str | None = None) -> Tensor:
    """Return tokens [B], or raise NonFinite for the first row with NO_TOKEN. Waits for the tokens' device."""
    if len(tokens) and int(tokens.min()) < 0:
        raise NonFinite(what, model, row=int((tokens < 0).to(torch.int8).argmax()))
    return tokens


def broken_row(rows: Tensor) -> Tensor:
    """Return the first of rows [T, H] with NaN or infinity, by its sum, else -1: int64 [1], on the rows' device."""
    broken = ~rows.float().sum(-1).isfinite()
    return torch.where(broken.any(), broken.to(torch.int8).argmax(), -1)[None]


def first_broken(rows: Tensor) -> int | None:
    """Return `broken_row`, or None if there is none. Waits for the rows' device."""
    place = int(broken_row(rows))
    return None if place < 0 else place


@contextmanager
def located(model: str, position: int = 0) -> Iterator[None]:
    """Add the model, unless it is known, and the block's position to a NonFinite that leaves the block."""
    try:
        yield
    except NonFinite as error:
        error.model = error.model or model
        error.position = None if error.position is None else error.position + position
        raise


@contextmanager
def name_nonfinite(prompts: Sequence[str]) -> Iterator[None]:
    """Add the prompt's id to a NonFinite that leaves the block. prompts: ids by their place in the batch."""
    try:
        yield
    except NonFinite as error:
        error.prompt = error.prompt or prompts[error.row or 0]
        raise
