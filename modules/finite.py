"""Numbers that are none: what a broken model gives is an error, and never a fast answer.

Tokens are chosen in `sampling`, which looks at what it reads anyway: the number of the token that is chosen, or the sum
of the probabilities that it is drawn from. Who knows the model, the position, the prompt or the path adds it as the
error passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.types import InputError

# In the place of a token where a row's numbers do not choose one: rows are looked at where they are read anyway.
NO_TOKEN = -1
NAMED = 5


class NonFinite(InputError):
    """A model gave NaN or infinite numbers. (A logit of -inf is a token that cannot come; but some token must.)

    what: the numbers. model: the flag of the model: target, draft, mid, eagle or acceptance. position: of the token
    that they were to choose or to verify, counted from 0 at the beginning of the prompt; None where it is not known.
    row: the prompt's place in a batch. prompt: its id. path: what the user passed the model as.
    """

    def __init__(
        self, what: str = "logits", model: str | None = None, position: int | None = 0, row: int | None = None
    ):
        super().__init__(what, "NaN or infinity", "finite numbers", "")
        self.what, self.model, self.position, self.row = what, model, position, row
        self.prompt: str | None = None
        self.path: str | None = None

    def passed(self, model: str | None = None, offset: int = 0) -> NonFinite:
        """This error, of this model where it has none yet, and so many tokens further on."""
        self.model = self.model or model
        if self.position is not None:
            self.position += offset
        return self

    def of(self, prompts: Sequence[str]) -> NonFinite:
        """This error, of one of these prompts, of which a message names a few."""
        more = f" and {len(prompts) - NAMED} more" if len(prompts) > NAMED else ""
        self.prompt = ", ".join(prompts[:NAMED]) + more
        return self

    def __str__(self) -> str:
        model = self.model or "model"
        path = f" ({self.path})" if self.path else ""
        place = "" if self.position is None else f" at position {self.position}"
        prompt = f" of prompt {self.prompt}" if self.prompt else ""
        return (
            f"{model}{path}: found NaN or infinite {self.what}{place}{prompt}, expected finite numbers. "
            "Its weights are damaged, or its dtype overflows: check its files, or pass --dtype float32."
        )


class blame:
    """A NonFinite that leaves the block is this model's unless another's, so many tokens on, and of this row where one
    is named."""

    def __init__(self, model: str | None = None, offset: int = 0, row: int | None = None):
        self._model, self._offset, self._row = model, offset, row

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NonFinite):
            error.row = error.row if self._row is None else self._row
            error.passed(self._model, self._offset)


def checked(tokens: Tensor, what: str = "logits") -> Tensor:
    """The tokens [B]; raises NonFinite of the first row that has none. It waits for the tokens' device."""
    if len(tokens) and int(tokens.min()) < 0:
        raise NonFinite(what, row=int((tokens < 0).to(torch.int8).argmax()))
    return tokens


def first_broken(rows: Tensor) -> int | None:
    """The first of rows [T, H] that holds a number that is not finite, by its sum. It waits for the rows' device."""
    broken = ~rows.float().sum(-1).isfinite()
    return int(broken.to(torch.int8).argmax()) if bool(broken.any()) else None
