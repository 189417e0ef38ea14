"""Sequential test that emitted tokens follow the target: bets at the target's own odds.

Every bet starts with a stake of 1. Every emitted token y multiplies it by 1 + l x(y), where l and x are fixed before y
is known and x has mean 0 under the target's distribution p: either a score of tokens minus its mean, or e / p - 1 with
the distribution e that a known sampling defect has there. Under p the mean of all stakes stays 1 on average, so it
reaches M with probability at most 1 / M, for any number of tokens and whenever one stops (Ville's inequality; test
martingales, Shafer et al. 2011). Nothing is approximated. If tokens do not follow p, the stakes of bets in the right
direction grow exponentially; having many bets costs the logarithm of their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.sampling import residual
from draftsmith.modules.types import InputError

# Strengths l of bets on a score and on single tokens (each with both signs), and of bets on a defect, where l is the
# share of tokens that have it.
STRENGTHS = (0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 0.95)
TOKEN_STRENGTHS = (0.03, 0.1, 0.3, 0.95)
DEFECT_SHARES = (0.3, 0.9)
COPY_STRENGTHS = (0.05, 0.5)  # of bets that an answer repeats the prompt's previous one
LOWEST = 8.0  # nats below the best token at which the score of probable tokens reaches 0
UNLIKELY = 0.15  # q below which the defective policy drops a drafted token
SCORES = (
    "what was drafted",
    "probable tokens",
    "high token ids, first of a round",
    "high token ids, drafted later",
    "high token ids, the target's own",
)
TOKENS, COPIES = "single tokens", "the answer before"


@dataclass(frozen=True)
class DecidedTokens:
    """N emitted tokens and everything that was known when each was decided.

    Attributes:
        token: [N] int64.
        target: [N, V] float64, the target's distribution.
        draft: [N, V], the distribution a draft was sampled from; 0 where none was.
        children: [N, V] bool, tokens drafted as tree nodes without sampling.
        first: [N] bool, the first token of a round.
        copied: [N] int64, the token of the prompt's previous answer if that answer is equal up to here, else -1.
    """

    token: Tensor
    target: Tensor
    draft: Tensor
    children: Tensor
    first: Tensor
    copied: Tensor

    @property
    def was_sampled(self) -> Tensor:
        """[N] bool: a sampled draft was verified here."""
        return self.draft.sum(-1) > 0

    def take(self, rows: slice | Tensor) -> DecidedTokens:
        """Return some of the tokens, by index or mask."""
        return DecidedTokens(*(column[rows] for column in vars(self).values()))


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p / q); 1 where q is 0 and nothing can be drawn."""
    return torch.where(q > 0, p / q, 1).clamp_max(1)


def mixture(drawn: Tensor, accept: Tensor, replacement: Tensor) -> Tensor:
    """Return the distribution of a token drawn from `drawn`, kept with probability `accept`, else replaced."""
    kept = drawn * accept
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_min(0) * replacement


def at_temperature(distribution: Tensor, temperature: float) -> Tensor:
    powered = distribution.pow(1 / temperature)
    total = powered.sum(-1, keepdim=True)
    return torch.where(total > 0, powered / total, distribution)


def accept_draw_reused(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution if the uniform number that drew a draft also decides on its acceptance."""
    below = q.cumsum(-1) - q
    accept = torch.where(q > 0, (acceptance(p, q) - below) / q, 1).clamp(0, 1)
    return mixture(q, accept, residual(p, q))


def rejecting_draw_reused(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution if the uniform number that rejected a draft also draws its replacement."""
    ratio, order = acceptance(p, q).sort(-1)
    mass = q.gather(-1, order)
    ends = residual(p, q).cumsum(-1)
    # For each cell of the residual: the drafted mass that is rejected by uniform numbers below the cell's end.
    count = torch.searchsorted(ratio.contiguous(), ends.contiguous(), right=True)
    mass_below, ratio_below = (F.pad(x.cumsum(-1), (1, 0)).gather(-1, count) for x in (mass, mass * ratio))
    rejected = ends * mass_below - ratio_below
    replacement = (rejected - F.pad(rejected, (1, 0))[..., :-1]).clamp_min(0)
    total = replacement.sum(-1, keepdim=True)
    return mixture(q, acceptance(p, q), torch.where(total > 0, replacement / total, p))


def unlikely_dropped(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution if a policy takes back a drafted token because of that token's own q."""
    likely = q * (q >= UNLIKELY)
    kept = likely * acceptance(p, q)
    dropped, rejected = (mass.sum(-1, keepdim=True) for mass in (q - likely, likely - kept))
    return kept + dropped * p + rejected * residual(p, q)


# Emitted distributions [N, V] of known defects, in closed form, given p and q where a draft was sampled.
DRAFT_DEFECTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rejected tokens replaced by draws from p": lambda p, q: mixture(q, acceptance(p, q), p),
    "drafts drawn at 0.8 of their temperature": lambda p, q: mixture(
        at_temperature(q, 0.8), acceptance(p, q), residual(p, q)
    ),
    "drafts drawn at 1.25 of their temperature": lambda p, q: mixture(
        at_temperature(q, 1.25), acceptance(p, q), residual(p, q)
    ),
    "drafts accepted with 1.25 p/q": lambda p, q: mixture(q, acceptance(1.25 * p, q), residual(p, q)),
    "a draft's own draw decides on it": accept_draw_reused,
    "the draw that rejects a token replaces it": rejecting_draw_reused,
    "drafts of q < 0.15 taken back": unlikely_dropped,
}
FIRST_DEFECT = "the draw that rejects a round's first token replaces it"
NODE_DEFECT = "tokens that miss a node's children drawn again"
TARGET_DEFECT = "target sampled at 0.9 of its temperature"
DEFECTS = (*DRAFT_DEFECTS, FIRST_DEFECT, NODE_DEFECT, TARGET_DEFECT)
NUM_FAMILIES = len(SCORES) + len(DEFECTS) + 2  # and single tokens, and copies


def defective(name: str, tokens: DecidedTokens) -> Tensor:
    """Return the distribution [N, V] that tokens have under a defect; p where the defect cannot act."""
    p, q, children = tokens.target, tokens.draft, tokens.children
    if name == TARGET_DEFECT:
        return at_temperature(p, 0.9)
    if name == NODE_DEFECT:
        missed = (p * ~children).sum(-1, keepdim=True)
        return torch.where(children.any(-1, keepdim=True), p * children + missed * p, p)
    sampled = tokens.was_sampled[:, None]
    if name == FIRST_DEFECT:
        return torch.where(sampled & tokens.first[:, None], rejecting_draw_reused(p, q), p)
    return torch.where(sampled, DRAFT_DEFECTS[name](p, q), p)


@dataclass(frozen=True)
class BetFamily:
    """Bets on the same x [N, V] that differ in strength."""

    name: str
    x: Tensor
    strengths: tuple[float, ...]


def both_signs(strengths: tuple[float, ...]) -> tuple[float, ...]:
    return (*strengths, *(-strength for strength in strengths))


def score_bets(tokens: DecidedTokens) -> Iterator[BetFamily]:
    """Yield the bets on scores in [0, 1] minus their means; a score is 0 where it says nothing about a token."""
    p, sampled = tokens.target, tokens.was_sampled[:, None]
    verified = sampled | tokens.children.any(-1, keepdim=True)
    order = p.cumsum(-1) - p / 2
    first = tokens.first[:, None] & verified
    values = (
        torch.where(sampled, torch.where(p > 0, tokens.draft / p, 0).clamp_max(1), tokens.children.to(p.dtype)),
        (1 + (p / p.amax(-1, keepdim=True)).log() / LOWEST).clamp_min(0),
        torch.where(first, order, 0),
        torch.where(verified & ~first, order, 0),
        torch.where(verified, 0, order),
    )
    for name, value in zip(SCORES, values, strict=True):
        yield BetFamily(name, value - (p * value).sum(-1, keepdim=True), both_signs(STRENGTHS))


class Evidence:
    """Logarithms of all stakes, by family of bets."""

    def __init__(self) -> None:
        self.stakes: dict[str, Tensor] = {}
        self.impossible = 0  # tokens that the target cannot emit

    def add(self, tokens: DecidedTokens) -> None:
        """Bet on more tokens; at most a few million entries of [N, V] at a time."""
        p, emitted = tokens.target, tokens.token[:, None]

        def add_logs(name: str, logs: Tensor) -> None:
            self.stakes[name] = self.stakes[name] + logs.cpu() if name in self.stakes else logs.cpu()

        families = list(score_bets(tokens))
        for name in DEFECTS:
            ratio = torch.where(p > 0, defective(name, tokens) / p - 1, 0)
            families.append(BetFamily(name, ratio, DEFECT_SHARES))
        for family in families:
            add_logs(family.name, log_factors(family.strengths, family.x.gather(1, emitted)[:, 0]).sum(1))

        # Bets on each token of the vocabulary: x is 1 at the token minus its probability.
        p_emitted = p.gather(1, emitted)[:, 0]  # [N]
        token_logs = []
        for strength in both_signs(TOKEN_STRENGTHS):
            hits = torch.log1p(strength * (1 - p_emitted)) - torch.log1p(-strength * p_emitted)
            token_logs.append(torch.log1p(-strength * p).sum(0).index_add(0, tokens.token, hits))
        add_logs(TOKENS, torch.stack(token_logs))

        # Bets that the prompt's previous answer is repeated, as with a seed that is used twice.
        before = tokens.copied.clamp_min(0)
        chance = torch.where(tokens.copied >= 0, p.gather(1, before[:, None])[:, 0], 0)
        copies = torch.where(chance > 0, (before == tokens.token) / chance - 1, 0)
        add_logs(COPIES, log_factors(COPY_STRENGTHS, copies).sum(1))

    @property
    def log_mean(self) -> float:
        """Logarithm of the mean stake; families count alike, and so do the bets of one."""
        if not self.stakes:
            return 0.0
        means = [stakes.flatten().logsumexp(0) - math.log(stakes.numel()) for stakes in self.stakes.values()]
        return float(torch.stack(means).logsumexp(0)) - math.log(NUM_FAMILIES)

    @property
    def p_value(self) -> float:
        """Upper bound of the probability of such evidence against a lossless method."""
        return 0.0 if self.impossible else math.exp(min(0.0, -self.log_mean))

    @property
    def strongest(self) -> str:
        """Describe the bet that won most."""
        if not self.stakes:
            return ""
        name, stakes = max(self.stakes.items(), key=lambda item: float(item[1].max()))
        if name == TOKENS:
            strength, token = divmod(int(stakes.argmax()), stakes.shape[1])
            return f"token {token} comes too {'often' if strength < len(TOKEN_STRENGTHS) else 'seldom'}"
        if name in SCORES:
            return f"{'towards' if int(stakes.argmax()) < len(STRENGTHS) else 'away from'} {name}"
        return f"repeats {name}" if name == COPIES else name


def log_factors(strengths: tuple[float, ...], x: Tensor) -> Tensor:
    """Return log(1 + l x) for every strength: x [...] -> [L, ...]."""
    strength = torch.tensor(strengths, dtype=x.dtype, device=x.device)
    return torch.log1p(strength.view(-1, *[1] * x.ndim) * x)


@dataclass(frozen=True)
class BetGrowth:
    """Mean and variance per token of a bet's logarithm under a biased sampler.

    After n tokens the logarithm is close to normal with mean n m and variance n v. The bet alone decides the test when
    it exceeds `handicap` (log of the number of bets it is averaged with) plus log(1 / level).
    """

    mean: float
    variance: float
    handicap: float

    def chance(self, tokens: float, level: float) -> float:
        """Return the probability that the bet decides the test within so many tokens."""
        deviation = max(math.sqrt(tokens * self.variance), 1e-300)
        return NormalDist().cdf((tokens * self.mean - self.handicap + math.log(level)) / deviation)

    def tokens_needed(self, power: float, level: float) -> float:
        """Return the number of tokens for that probability; infinite if the bet does not grow."""
        if self.mean <= 0:
            return math.inf
        z, threshold = NormalDist().inv_cdf(power), self.handicap - math.log(level)
        root = math.sqrt(z * z * self.variance + 4 * self.mean * threshold)
        return ((z * math.sqrt(self.variance) + root) / (2 * self.mean)) ** 2


def growth_of_biases(tokens: DecidedTokens, bias: float) -> dict[str, list[BetGrowth]]:
    """Return the growth of the bets on a score under samplers biased along that score.

    The biased sampler is p exp(t x), normalised, with t such that its mean total variation distance from p is `bias`.
    Directions in which these tokens do not allow such a bias are left out.

    Raises:
        InputError: the bias is too small for the weakest bets.
    """
    p = tokens.target
    growths: dict[str, list[BetGrowth]] = {}
    for family in score_bets(tokens):
        for sign, word in ((1, "towards"), (-1, "away from")):
            biased, tilt = tilted(p, sign * family.x, bias)
            if tilt < 0.6 * STRENGTHS[0]:
                expected = "a bias that the weakest bets can detect on these prompts"
                raise InputError("bias", bias, expected, "Raise --bias, or choose other prompts.")
            if biased is None:
                continue
            handicap = math.log(NUM_FAMILIES * len(family.strengths))
            bets = []
            for strength in family.strengths:
                logs = torch.log1p(strength * family.x)  # [N, V]
                mean = float((biased * logs).sum(-1).mean())
                bets.append(BetGrowth(mean, float((biased * logs.square()).sum(-1).mean()) - mean**2, handicap))
            growths[f"{word} {family.name}"] = bets
    return growths


def tilted(p: Tensor, x: Tensor, bias: float) -> tuple[Tensor | None, float]:
    """Return p exp(t x) [N, V] at mean total variation `bias` from p, and t; None if no t up to 50 reaches it."""
    tilt = bias / max(float((p * x.abs()).sum(-1).mean()) / 2, 1e-12)
    for _ in range(30):
        if tilt > 50:
            break
        biased = p * (tilt * x).exp()
        biased /= biased.sum(-1, keepdim=True)
        distance = float((biased - p).abs().sum(-1).mean()) / 2
        if abs(distance / bias - 1) < 0.02:
            return biased, tilt
        tilt *= bias / max(distance, 1e-12)
    return None, tilt
