"""Evidence that emitted tokens do not follow the target: bets on them, at the target's own odds.

Every bet starts with a stake of 1, and every emitted token y multiplies it by 1 + l x(y), where x and l are fixed
before y is known and x has the mean 0 under p, the target's distribution given all that came before: either a score of
tokens less its mean, or e / p - 1 with the distribution e that a known defect has there. Under p each factor is 1 on
average, so the mean of all stakes is, too, and reaches M with probability at most 1 / M, however many tokens there are
and whenever one stops looking (Ville's inequality; a test martingale, Shafer et al. 2011). No distribution is
approximated. Where tokens do not follow p, the stakes of bets in the right direction grow exponentially; that there are
others beside them costs the logarithm of their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.lossless.defects import DEFECTS, defective

# l of the bets on a score and on single tokens, with both signs; and on a defect: the share of tokens that have it.
STRENGTHS = (0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 0.95)
TOKEN_STRENGTHS = (0.03, 0.1, 0.3, 0.95)
SHARES = (0.3, 0.9)
# What a bet lays on a repetition of the prompt's answer before this one.
COPIED_STAKES = (0.05, 0.5)
LOWEST = 8.0  # nats below the best token, where a score of probability ends
SCORES = (
    "what was drafted",
    "probable tokens",
    "high token ids, first of a round",
    "high token ids, drafted later",
    "high token ids, the target's own",
)
TOKENS, COPIES = "single tokens", "the answer before"
NUM_FAMILIES = len(SCORES) + len(DEFECTS) + 2


@dataclass(frozen=True)
class Decided:
    """N emitted tokens, and all that was known when each was decided.

    target: [N, V] float64, the target's distribution. draft: [N, V], what a draft was drawn from there, 0 where none
    was. children: [N, V] bool, the nodes chosen there. first: [N] bool, it is a round's first token. copied: [N] int64,
    what the answer before this one has there if all is equal up to there, else -1.
    """

    token: Tensor
    target: Tensor
    draft: Tensor
    children: Tensor
    first: Tensor
    copied: Tensor

    @property
    def drawn(self) -> Tensor:
        """[N] bool: a drafted token was verified."""
        return self.draft.sum(-1) > 0

    @property
    def chosen(self) -> Tensor:
        return self.children.any(-1)


@dataclass(frozen=True)
class BetFamily:
    """Bets that differ in strength: x [N, V] at N tokens, and the strengths l."""

    name: str
    x: Tensor
    strengths: tuple[float, ...]

    @property
    def handicap(self) -> float:
        """Log of what a bet of the family has to win for the mean of all stakes to be 1."""
        return math.log(NUM_FAMILIES * len(self.strengths))


def scores(found: Decided) -> Iterator[BetFamily]:
    """Bets on scores in [0, 1], less their means; 0 where a score says nothing about a token."""
    p, drawn = found.target, found.drawn[:, None]
    verified = drawn | found.chosen[:, None]
    best = p.amax(-1, keepdim=True)
    order = p.cumsum(-1) - p / 2
    first = found.first[:, None] & verified
    values = (
        torch.where(drawn, torch.where(p > 0, found.draft / p, 0).clamp_max(1), found.children.to(p.dtype)),
        (1 + (p / best).log() / LOWEST).clamp_min(0),
        torch.where(first, order, 0),
        torch.where(verified & ~first, order, 0),
        torch.where(verified, 0, order),
    )
    for name, value in zip(SCORES, values, strict=True):
        yield BetFamily(name, value - (p * value).sum(-1, keepdim=True), both_signs(STRENGTHS))


def defects(found: Decided) -> Iterator[BetFamily]:
    """Bets that tokens follow the distribution of a defect, at least a share of them."""
    p = found.target
    for name in DEFECTS:
        distribution = defective(name, p, found.draft, found.children, found.first)
        yield BetFamily(name, torch.where(p > 0, distribution / p - 1, 0), SHARES)


def single_token(found: Decided, token: int) -> BetFamily:
    """The bets on one token: they are of a family in which every token has as many."""
    x = torch.zeros_like(found.target)
    x[:, token] = 1
    return BetFamily(f"token {token}", x - found.target[:, token : token + 1], both_signs(TOKEN_STRENGTHS))


def both_signs(strengths: tuple[float, ...]) -> tuple[float, ...]:
    return (*strengths, *(-strength for strength in strengths))


def growth(strengths: tuple[float, ...], x: Tensor) -> Tensor:
    """Logs of the factors: x [...] -> [L, ...]."""
    of = torch.tensor(strengths, dtype=x.dtype, device=x.device)
    return torch.log1p(of.view(-1, *[1] * x.ndim) * x)


class Evidence:
    """The logs of all stakes, by family."""

    def __init__(self) -> None:
        self.stakes: dict[str, Tensor] = {}
        self.impossible = 0  # tokens that the target cannot emit

    def add(self, found: Decided) -> None:
        """More tokens, at most a few million entries of [N, V] at a time."""
        y = found.token[:, None]
        for family in (*scores(found), *defects(found)):
            self._grow(family.name, growth(family.strengths, family.x.gather(1, y)[:, 0]).sum(1))
        self._grow(TOKENS, torch.stack([token_stakes(found, of) for of in both_signs(TOKEN_STRENGTHS)]))
        before = found.copied.clamp_min(0)
        chance = torch.where(found.copied >= 0, found.target.gather(1, before[:, None])[:, 0], 0)
        copies = torch.where(chance > 0, (before == found.token) / chance - 1, 0)
        self._grow(COPIES, growth(COPIED_STAKES, copies).sum(1))

    def _grow(self, name: str, more: Tensor) -> None:
        self.stakes[name] = self.stakes[name] + more.cpu() if name in self.stakes else more.cpu()

    @property
    def log_mean(self) -> float:
        """Log of the mean stake: families count alike, and so do the bets of one."""
        if not self.stakes:
            return 0.0
        means = [stakes.flatten().logsumexp(0) - math.log(stakes.numel()) for stakes in self.stakes.values()]
        return float(torch.stack(means).logsumexp(0)) - math.log(NUM_FAMILIES)

    @property
    def p_value(self) -> float:
        """A lossless method has one below a with probability at most a; 0 where the target cannot emit a token."""
        return 0.0 if self.impossible else math.exp(min(0.0, -self.log_mean))

    @property
    def strongest(self) -> str:
        """The bet that won most, in words."""
        if not self.stakes:
            return ""
        name, stakes = max(self.stakes.items(), key=lambda item: float(item[1].max()))
        if name == TOKENS:
            strength, token = divmod(int(stakes.argmax()), stakes.shape[1])
            return f"token {token} comes too {'often' if strength < len(TOKEN_STRENGTHS) else 'seldom'}"
        if name in SCORES:
            return f"{'towards' if int(stakes.argmax()) < len(STRENGTHS) else 'away from'} {name}"
        return f"repeats {name}" if name == COPIES else name


def token_stakes(found: Decided, strength: float) -> Tensor:
    """What bets of this strength on each token grew by, [V]."""
    p = found.target
    at = p.gather(1, found.token[:, None])[:, 0]
    hits = torch.log1p(strength * (1 - at)) - torch.log1p(-strength * at)
    return torch.log1p(-strength * p).sum(0).index_add(0, found.token, hits)
