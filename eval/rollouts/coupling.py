"""Drafts coupled with a given text: the target's verdicts on them are known, and their law is the drafter's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftsmith.eval.rollouts.rollouts import Answer
from draftsmith.modules.decoding.protocols import Source
from draftsmith.modules.sampling import residual


@dataclass(frozen=True)
class Text:
    """The target's tokens [n] from the answer's first on. laws [n, V]: p that each was drawn from, None when greedy.
    uniforms: one in [0, 1) a token, for whichever round meets it."""

    tokens: list[int]
    laws: Tensor | None
    uniforms: list[float]


@dataclass(frozen=True)
class Reading:
    """An answer of n tokens as the target read it.

    text: the answer, and what the target would have gone on with after its end token.
    features [P + n, H]: of the prompt's P tokens and of the answer's, after the final norm. logits [n, V]: row i
    predicts answer token i.
    """

    answer: Answer
    text: Text
    features: Tensor
    logits: Tensor


def num_equal(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens that are the same. A coupled draft differs from the text exactly where it is rejected."""
    pairs = enumerate(zip(drafted, text, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(drafted), len(text)))


class CoupledSource:
    """Draws the drafts of one round, which begins before token `start` of the text (see `rollouts.py`).

    x ~ p is the text's token. With probability min(1, q(x)/p(x)) the draft is x, which is how often x is drawn and
    accepted: p(x) min(1, q/p) = min(p, q) = q(x) min(1, p/q). Else it is y ~ norm((q - p)+), drawn and rejected with
    probability (q(y) - p(y))+ = q(y) (1 - min(1, p/q)), and x, which then follows norm((p - q)+), is what the target
    replaces it by. After a rejection, and past the text's end, `free` draws.
    """

    def __init__(self, text: Text, start: int, free: Source):
        self._text, self._place, self._free = text, start, free
        self._on_text = True

    def accept(self, prob: float) -> bool:
        raise AssertionError("a drafter draws; verdicts are the text's")

    def draw(self, probs: Tensor) -> int:
        place = self._place
        self._place += 1
        laws, tokens = self._text.laws, self._text.tokens
        if not self._on_text or laws is None or place >= len(tokens):
            return self._free.draw(probs)
        token, law = tokens[place], laws[place]
        if self._text.uniforms[place] * law[token].item() < probs[token].item():
            return token
        self._on_text = False
        return self._free.draw(residual(probs, law))
