"""Drafts coupled with a given text: the target's verdicts on them are known, and their distribution is the drafter's
own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.replay.rollouts import TargetAnswer
from draftsmith.modules.finite import checked
from draftsmith.modules.sampling import Source, best_tokens, draw_rows, probabilities, residual
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class TargetText:
    """The target's tokens [n] from the answer's first on. distributions [n, V]: p that each was drawn from, None when
    greedy. uniforms: one in [0, 1) a token, for whichever round meets it."""

    tokens: list[int]
    distributions: Tensor | None
    uniforms: list[float]


@dataclass(frozen=True)
class ReadAnswer:
    """An answer of n tokens as the target read it.

    text: the answer, and what the target would have gone on with after its end token.
    features [P + n, H]: of the prompt's P tokens and of the answer's, after the final norm. logits [n, V]: row i
    predicts answer token i.
    """

    answer: TargetAnswer
    text: TargetText
    features: Tensor
    logits: Tensor


def num_equal(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens that are the same. A coupled draft differs from the text exactly where it is rejected."""
    pairs = enumerate(zip(drafted, text, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(drafted), len(text)))


@dataclass(frozen=True)
class RoundVerdict:
    """What the text says of a round's draft. accepted: tokens that are kept, within the answer. past_end: tokens beyond
    these that the target would have gone on with. labelled: tokens down to and with the first rejected one, within the
    answer."""

    accepted: int
    past_end: int
    labelled: int


def verdict_of(drafted: Sequence[int], reading: ReadAnswer, start: int) -> RoundVerdict:
    """The verdict on a draft that begins before answer token `start`."""
    left = len(reading.answer.tokens) - start
    equal = num_equal(drafted, reading.text.tokens[start:])
    accepted = min(equal, left)
    return RoundVerdict(accepted, equal - accepted, min(equal + 1, len(drafted), left))


class CoupledSource:
    """Draws the drafts of one round, which begins before token `start` of the text (see `rollouts.py`).

    x ~ p is the text's token. With probability min(1, q(x)/p(x)) the draft is x, which is how often x is drawn and
    accepted: p(x) min(1, q/p) = min(p, q) = q(x) min(1, p/q). Else it is y ~ norm((q - p)+), drawn and rejected with
    probability (q(y) - p(y))+ = q(y) (1 - min(1, p/q)), and x, which then follows norm((p - q)+), is what the target
    replaces it by. After a rejection, and past the text's end, `free` draws.
    """

    def __init__(self, text: TargetText, start: int, free: Source):
        self._text, self._place, self._free = text, start, free
        self._on_text = True

    def accept(self, prob: float) -> bool:
        raise AssertionError("a drafter draws; verdicts are the text's")

    def draw(self, probs: Tensor) -> int:
        place = self._place
        self._place += 1
        distributions, tokens = self._text.distributions, self._text.tokens
        if not self._on_text or distributions is None or place >= len(tokens):
            return self._free.draw(probs)
        token, distribution = tokens[place], distributions[place]
        if self._text.uniforms[place] * distribution[token].item() < probs[token].item():
            return token
        self._on_text = False
        return self._free.draw(residual(probs, distribution))


class CoupledDraws:
    """The same for rounds that draft side by side, one from each place of the answer, and what is known of their
    tokens. Greedy drafts are the argmax."""

    def __init__(self, reading: ReadAnswer, depth: int, params: SamplingParams, seed: int):
        """depth: tokens of a draft. seed: of the draws that the text does not decide."""
        self._text, self._params = reading.text, params
        self._starts = torch.arange(1, len(reading.answer.tokens))
        shape = (len(self._starts), depth)
        self._free = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._on_text = torch.ones(len(self._starts), dtype=torch.bool)
        self.known = {
            name: torch.full(shape, torch.nan, dtype=torch.float64)
            for name in ("log_q", "log_max_q", "entropy", "accept_prob", "overlap")
        }

    def __call__(self, piece: slice, level: int, logits: Tensor) -> Tensor:
        greedy, text = self._params.greedy, self._text
        distributions = logits.float().softmax(-1) if greedy else probabilities(logits, self._params)
        # Past its end the text says nothing: the last token stands in for what is not looked at.
        place = self._starts[piece] + level
        within, place = place < len(text.tokens), place.clamp(max=len(text.tokens) - 1)
        wanted = torch.tensor(text.tokens)[place].to(distributions.device)
        if text.distributions is None:
            tokens, on_text = checked(best_tokens(logits)), self._on_text[piece]
            accept = overlap = (tokens == wanted).double()
        else:
            tokens, on_text = self._draw(piece, level, distributions, text.distributions[place], wanted, within)
            overlap = torch.minimum(distributions, text.distributions[place]).sum(-1).double()
            accept = (_at(text.distributions[place], tokens) / _at(distributions, tokens)).clamp_max(1)
        self._on_text[piece] = on_text & within & (tokens == wanted).cpu()
        found = {
            "log_q": _at(distributions, tokens).log(),
            "log_max_q": distributions.amax(-1).double().log(),
            "entropy": -torch.xlogy(distributions, distributions).sum(-1).double(),
            "accept_prob": accept,
            "overlap": overlap,
        }
        for name, values in found.items():
            self.known[name][piece, level] = values.cpu()
        return tokens

    def _draw(
        self, piece: slice, level: int, distributions: Tensor, target: Tensor, wanted: Tensor, within: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [s], and which drafts had been on the text before them. distributions, target [s, V]; wanted, within
        [s]."""
        on_text = self._on_text[piece] & within
        place = (self._starts[piece] + level).clamp(max=len(self._text.uniforms) - 1)
        uniforms = torch.tensor(self._text.uniforms, dtype=torch.float64)[place].to(distributions.device)
        follows = on_text.to(distributions.device)
        keep = follows & (uniforms * _at(target, wanted) < _at(distributions, wanted))
        free = torch.where(follows[:, None], residual(distributions, target), distributions)
        others = checked(draw_rows(free, self._free[piece, level].to(distributions.device)))
        return torch.where(keep, wanted, others), on_text


def _at(distributions: Tensor, tokens: Tensor) -> Tensor:
    """[s]: of each distribution [s, V] its token's probability, float64."""
    return distributions.gather(1, tokens[:, None])[:, 0].double()
