"""Drafts coupled with a given text: the target's verdicts on them are known, and their distribution is the drafter's
own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.replay.rollouts import TargetAnswer
from draftsmith.modules.decoding.confidence import entropies
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
    features [P + n, F]: of the prompt's P tokens and of the answer's, after the final norm, or of the layers that were
    asked for. logits [n, V]: row i predicts answer token i.
    """

    answer: TargetAnswer
    text: TargetText
    features: Tensor
    logits: Tensor


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
    """The same for rounds that draft side by side, one from each place of the answer. Greedy drafts are the argmax.

    known: `confidence_columns` of what was drawn, [S, K] each.
    """

    def __init__(self, reading: ReadAnswer, depth: int, params: SamplingParams, seed: int):
        """depth: tokens of a draft, K. seed: of the draws that the text does not decide."""
        self._text, self._params = reading.text, params
        self._starts = torch.arange(1, len(reading.answer.tokens))
        shape = (len(self._starts), depth)
        self._free = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._on_text = torch.ones(len(self._starts), dtype=torch.bool)
        self.known: dict[str, Tensor] = {}

    def __call__(self, piece: slice, level: int, logits: Tensor) -> Tensor:
        if self._params.greedy:
            distributions, tokens = logits.float().softmax(-1), checked(best_tokens(logits))
        else:
            distributions = probabilities(logits, self._params)
            tokens = self._draw(piece, level, distributions)
        columns = confidence_columns(distributions, tokens, self._text, self._starts[piece] + level)
        for name, values in columns.items():
            self.known.setdefault(name, torch.full_like(self._free, torch.nan))[piece, level] = values.cpu()
        return tokens

    def _draw(self, piece: slice, level: int, distributions: Tensor) -> Tensor:
        """Tokens [s] from distributions [s, V]."""
        text, place, device = self._text, self._starts[piece] + level, distributions.device
        on_text, place = self._on_text[piece] & (place < len(text.tokens)), place.clamp(max=len(text.tokens) - 1)
        assert text.distributions is not None
        target, wanted = text.distributions[place], torch.tensor(text.tokens)[place].to(device)
        uniforms = torch.tensor(text.uniforms, dtype=torch.float64)[place].to(device)
        follows = on_text.to(device)
        keep = follows & (uniforms * _at(target, wanted) < _at(distributions, wanted))
        free = torch.where(follows[:, None], residual(distributions, target), distributions)
        others = checked(draw_rows(free, self._free[piece, level].to(device)))
        tokens = torch.where(keep, wanted, others)
        self._on_text[piece] = on_text & (tokens == wanted).cpu()
        return tokens


def confidence_columns(distributions: Tensor, tokens: Tensor, text: TargetText, places: Tensor) -> dict[str, Tensor]:
    """Columns of `ChainRollouts` for tokens [s], drawn from distributions [s, V] at these places [s] of the text:
    `log_q`, `log_max_q`, `entropy`, and when sampling `accept_prob`, which past the text's end says nothing; float64
    [s] each."""
    own = _at(distributions, tokens)
    columns = {
        "log_q": own.log(),
        "log_max_q": distributions.amax(-1).double().log(),
        "entropy": entropies(distributions).double(),
    }
    if text.distributions is not None:
        target = text.distributions[places.clamp(max=len(text.tokens) - 1)]
        columns["accept_prob"] = (_at(target, tokens) / own).clamp_max(1)
    return columns


def _at(distributions: Tensor, tokens: Tensor) -> Tensor:
    """[s]: of each distribution [s, V] its token's probability, float64."""
    return distributions.gather(1, tokens[:, None])[:, 0].double()
