"""How surely a bias is found on these prompts, and how many tokens that takes: computed from the distributions p and q
that stood where some of the tokens were decided.

Under an alternative distribution e a bet's logarithm grows by a mean m a token, of variance v. After n tokens it has
reached what is asked of it with the probability of a normal variate; the best bet's is stated, which the mean of all
stakes only exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from draftsmith.eval.lossless.defects import DEFECTS, OF_NODES, UNSTATED, defective
from draftsmith.eval.lossless.evidence import BetFamily, Decided, growth, scores, single_token
from draftsmith.eval.lossless.evidence import defects as bets_on_defects
from draftsmith.modules.types import InputError

DRAWS = 48  # of each alternative at each token
CLOSE = 0.02  # a bias is this near to the one asked for, relatively
WEAKEST = 0.6  # tilt, by the strength of a family's weakest bet, below which that bet hardly grows or shrinks
TRIES, STEEPEST = 30, 50.0  # steps, and the tilt beyond which a direction has nothing more to give


@dataclass(frozen=True)
class Growth:
    """Growth of the bets under one alternative: its distance from the target, means and variances a token [bets] of
    their logarithms, and the logarithm that each bet has to reach for a mean stake of 1."""

    tv: float
    mean: Tensor
    variance: Tensor
    handicap: Tensor

    def chance(self, tokens: float, level: float) -> float:
        """Probability of a mean stake of 1 / level after so many tokens."""
        deviation = (tokens * self.variance).sqrt().clamp_min(1e-300)
        ahead = (tokens * self.mean - self.handicap + math.log(level)) / deviation
        return float(torch.special.ndtr(ahead).max())

    def needed(self, power: float, level: float) -> float:
        """Tokens for that chance; infinity where no bet grows."""
        z = NormalDist().inv_cdf(power)
        reached = self.handicap - math.log(level)
        grows = self.mean > 0
        if not bool(grows.any()):
            return math.inf
        mean, variance, reached = self.mean[grows], self.variance[grows], reached[grows]
        inside = z * z * variance + 4 * mean * reached
        return float(((z * variance.sqrt() + inside.sqrt()) / (2 * mean)).square().min())


@dataclass(frozen=True)
class Power:
    """Growth under biases of the size asked for, and under known defects as they are, by name. Biases that cannot get
    that large on these prompts are left out, and so are defects that the method cannot have."""

    bias: float
    biases: Mapping[str, Growth]
    defects: Mapping[str, Growth]

    @property
    def large(self) -> dict[str, Growth]:
        """All of them that are as large as what was asked for."""
        at_least = self.bias * (1 - 2 * CLOSE)
        return {name: each for name, each in {**self.biases, **self.defects}.items() if each.tv >= at_least}

    def needed(self, power: float, level: float) -> float:
        """Tokens that find each of the large ones with at least this probability."""
        return max((each.needed(power, level) for each in self.large.values()), default=0.0)


def power_of(found: Decided, bias: float, generator: torch.Generator) -> Power:
    """found: a sample of the tokens, with room for some twenty tensors like its `target`."""
    p = found.target
    often = int((p * (1 - p)).sum(0).argmax())
    directions = [*scores(found), single_token(found, often)]
    bets = [*directions, *bets_on_defects(found)]
    biases = {}
    for family in directions:
        for sign, word in ((1.0, "towards"), (-1.0, "away from")):
            distribution, tilt = tilted(p, sign * family.x, bias)
            if tilt < WEAKEST * family.strengths[0]:
                expected = "one that the weakest bets grow on with these prompts"
                raise InputError("bias", bias, expected, "Raise --bias, or choose other prompts.")
            if distribution is not None:
                biases[f"{word} {family.name}"] = growth_under(distribution, p, bets, generator)
    known = {
        name: growth_under(defective(name, p, found.draft, found.children, found.first), p, bets, generator)
        for name in DEFECTS
        if name != UNSTATED and (bool((found.chosen if name == OF_NODES else found.drawn).any()) or name == DEFECTS[-1])
    }
    return Power(bias, biases, known)


def tilted(p: Tensor, centre: Tensor, bias: float) -> tuple[Tensor | None, float]:
    """p exp(t centre), normalised, with a t that makes the mean total variation from p `bias`, and t; None where none
    does."""
    slope = float((p * centre.abs()).sum(-1).mean()) / 2
    tilt = bias / max(slope, 1e-12)
    for _ in range(TRIES):
        if tilt > STEEPEST:
            break
        distribution = p * (tilt * centre).exp()
        distribution /= distribution.sum(-1, keepdim=True)
        reached = variation(distribution, p)
        if abs(reached / bias - 1) < CLOSE:
            return distribution, tilt
        tilt *= bias / max(reached, 1e-12)
    return None, tilt


def variation(distribution: Tensor, p: Tensor) -> float:
    """Mean over tokens of the total variation distance."""
    return float((distribution - p).abs().sum(-1).mean()) / 2


def growth_under(distribution: Tensor, p: Tensor, bets: Sequence[BetFamily], generator: torch.Generator) -> Growth:
    """Growth of these bets at tokens drawn from `distribution` [N, V] where the target's is p: spread evenly over
    it."""
    sums = distribution.cumsum(-1)
    uniforms = torch.rand(len(distribution), DRAWS, dtype=distribution.dtype, generator=generator).to(
        distribution.device
    )
    uniforms = (uniforms + torch.arange(DRAWS, device=distribution.device)) / DRAWS
    drawn = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).clamp_max(distribution.shape[1] - 1)
    means, variances, handicaps = [], [], []
    for family in bets:
        logs = growth(family.strengths, family.x.gather(1, drawn))  # [strengths, N, draws]
        means.append(logs.mean((1, 2)).cpu())
        variances.append(logs.var((1, 2)).cpu())
        handicap = family.handicap + (math.log(distribution.shape[1]) if family.name.startswith("token ") else 0)
        handicaps.append(torch.full((len(family.strengths),), handicap, dtype=torch.float64))
    return Growth(variation(distribution, p), *(torch.cat(each).double() for each in (means, variances, handicaps)))
