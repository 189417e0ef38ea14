"""Anytime-valid test of a server's counters against a head's card, by bets on sums over answers.

A server counts sums: answers, drafts D, and accepted tokens A. Drafts of one answer are alike, so that the sample is
the answers. Those of the card give the distribution of x = a - mu d, where a tokens were accepted in an answer's d
drafts and mu is their ratio. If m answers of the server are like the card's, then

    exp(l (A - mu D) - m log E exp(l x))

has mean 1 for every strength l, whenever one looks: a test martingale, which reaches 1 / p with probability p at most
(Ville's inequality; Shafer et al. 2011). With l below 0 it grows if fewer tokens are accepted. One stake is shared by
bets of several strengths, on all places of a draft and on single ones, and by bets that begin later, as a fall may come
after months without one. mu is known from the card's own answers only: for each mu these bet that theirs is on the
other side of it, and the product of both bets counts where it is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Changes of tau that are bet on, and their shares of the stake.
CHANGES = {0.05: 0.3, 0.1: 0.4, 0.2: 0.2, 0.4: 0.1}
# How far the card may have missed its mean, in standard errors: what its answers bet on, and all means that are tried.
MISSED = {0.0: 0.4, 1.0: 0.15, 2.0: 0.15, 3.0: 0.15, 4.0: 0.15}
TRIED = np.linspace(-6.0, 6.0, 97)
OF_ALL_PLACES = 0.75  # share of the stake; the rest is on single places
FEWEST_ANSWERS = 30  # of a card, for its distribution to be known
NOTHING = -1e300  # logarithm of a stake of 0, in JSON
FEWEST_POLLS = 10  # before the variance between them is used


@dataclass(frozen=True)
class CardAnswers:
    """Counts of N answers that a card keeps: drafts [N], and accepted tokens by place in the draft [N, K]."""

    drafts: Floats
    accepted: Floats

    @property
    def by_place(self) -> Floats:
        """Share of the drafts of which n tokens or more were accepted: [K]."""
        return np.asarray(self.accepted.sum(0) / self.drafts.sum())

    @property
    def tau(self) -> float:
        """Tokens that a round with a draft emits."""
        return 1 + float(self.by_place.sum())

    def detectable(self, level: float) -> float:
        """Return the smallest fall, as a share of tau, that any number of the server's answers can show.

        It is limited by the card's own error: the product of both bets grows to exp(N d^2 / 2) for a fall of d standard
        deviations of an answer, over the shares of the best bets.
        """
        bets = Bets(self.drafts, self.accepted.sum(1), -1)
        shares = math.log(OF_ALL_PLACES / 2) + math.log(min(CHANGES.values())) + math.log(MISSED[4.0])
        deviations = math.sqrt(2 * (math.log(1 / level) - shares) / len(self.drafts))
        return deviations * math.sqrt(bets.variance) / float(self.drafts.mean()) / self.tau


class Bets:
    """Bets that one sum over answers is lower (sign -1) or higher (sign 1) than the card's answers say.

    Attributes:
        mean: accepted tokens a draft of the card's answers. variance: of an answer's sum around it.
        stakes: [L, M] logarithms of what bets of L strengths are worth, for each of M means.
    """

    def __init__(self, drafts: Floats, accepted: Floats, sign: int):
        """drafts, accepted: [N] of the card's answers."""
        count, self.mean = len(drafts), float(accepted.sum() / drafts.sum())
        noise = accepted - self.mean * drafts  # [N]
        self.variance = max(float(noise @ noise) / (count - 1), 1e-12)
        deviation = math.sqrt(self.variance)
        self._means = self.mean + TRIED * deviation / math.sqrt(count) / drafts.mean()  # [M]
        changes = np.array([*CHANGES]) * (1 + self.mean) * drafts.mean()  # of an answer's sum
        self._strengths = sign * changes / self.variance  # [L]
        self._growth = log_mean_exp(self._strengths, noise)  # [L]
        self._shares = np.log([*CHANGES.values()])
        strengths = -sign * np.array([*MISSED]) / math.sqrt(count) / deviation
        gains = strengths[:, None] * (self.mean - self._means) * drafts.sum()
        bets = gains - count * log_mean_exp(strengths, noise)[:, None]
        self._card = np.logaddexp.reduce(np.log([*MISSED.values()])[:, None] + bets)  # [M]
        self.stakes = np.full((len(CHANGES), len(TRIED)), -np.inf)

    def add(self, answers: float, drafts: float, accepted: float, inflation: float, begun: float) -> None:
        """Bet on what was counted since the last time.

        inflation: variance of an answer's sum over the card's. begun: logarithm of the stake of bets that begin now.
        """
        sums = (accepted - self._means * drafts) / math.sqrt(inflation)  # [M]
        gains = self._strengths[:, None] * sums - answers * self._growth[:, None]
        self.stakes = np.logaddexp(self.stakes, begun + self._shares[:, None]) + gains

    def worth(self, left: float) -> float:
        """Return the logarithm of what all is worth. left: logarithm of the stake of bets that have not begun."""
        return float((np.logaddexp(np.logaddexp.reduce(self.stakes), left) + self._card).min())


def log_mean_exp(strengths: Floats, noise: Floats) -> Floats:
    """Return log E exp(l x) for L strengths: [L]. noise: x of N answers."""
    return np.asarray(np.logaddexp.reduce(strengths[:, None] * noise, 1) - math.log(len(noise)))


def stake_left(begun: int) -> float:
    """Return the share of the stake that is left once bets have begun so many times.

    The first ones have half of it, those of the n-th time about 1 / (2 n log^2 n).
    """
    return 1.0 if not begun else 0.5 / math.log(begun - 1 + math.e)


class Evidence:
    """All evidence that a server's answers are accepted less, or more, than the card's.

    Attributes:
        falls, rises: the largest that either was worth so far, as logarithms.
    """

    def __init__(self, card: CardAnswers):
        self._places = card.accepted.shape[1]
        sums = [card.accepted.sum(1), *card.accepted.T]
        self._falls = [Bets(card.drafts, own, -1) for own in sums]
        self._rises = Bets(card.drafts, sums[0], 1)
        self._mean_drafts = float(card.drafts.mean())
        self.falls = self.rises = 0.0
        self._begun = 0
        self._totals = np.zeros(3)  # answers, drafts, accepted tokens
        self._squares = np.zeros((2, 2))  # sum over polls: products of drafts and accepted tokens, by answers

    @property
    def p_fall(self) -> float:
        """Bound of the probability of such evidence of a fall at any time, if the answers are like the card's."""
        return math.exp(-max(0.0, self.falls))

    @property
    def p_rise(self) -> float:
        """The same of a rise."""
        return math.exp(-max(0.0, self.rises))

    def to_json(self) -> dict[str, Any]:
        """Return all that `restore` needs."""
        stakes = [np.nan_to_num(each.stakes, neginf=NOTHING).tolist() for each in self._bets]
        sums = {"totals": self._totals.tolist(), "squares": self._squares.tolist()}
        return {"falls": self.falls, "rises": self.rises, "begun": self._begun, **sums, "stakes": stakes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `to_json` gave, of the same card.

        Raises:
            ValueError: numbers of another shape.
        """
        for each, stakes in zip(self._bets, saved["stakes"], strict=True):
            each.stakes = np.asarray(stakes, np.float64).reshape(each.stakes.shape)
        self._totals = np.asarray(saved["totals"], np.float64).reshape(3)
        self._squares = np.asarray(saved["squares"], np.float64).reshape(2, 2)
        self.falls, self.rises, self._begun = float(saved["falls"]), float(saved["rises"]), int(saved["begun"])

    @property
    def _bets(self) -> list[Bets]:
        return [*self._falls, self._rises]

    def add(self, answers: int, drafts: int, accepted: Sequence[int]) -> None:
        """Bet on what was counted since the last time.

        answers: those that began. accepted: tokens by place, [K]; of all places together, [1], where a server counts
        no places.
        """
        if answers <= 0 or drafts <= 0:
            return
        total = float(sum(accepted))
        inflation = self._inflation(answers, drafts)
        before, self._begun = stake_left(self._begun), self._begun + 1
        left = stake_left(self._begun)
        begun = math.log(before - left)
        by_place = len(accepted) == self._places and self._places > 1
        counted = [total, *map(float, accepted)] if by_place else [total]
        bets = [*zip(self._falls, counted, strict=False), (self._rises, total)]
        for each, own in bets:
            each.add(answers, drafts, own, inflation, begun)
        worth = [each.worth(math.log(left)) for each, _ in bets[:-1]]
        shares = [OF_ALL_PLACES, *[(1 - OF_ALL_PLACES) / self._places] * self._places] if by_place else [1.0]
        self.falls = max(self.falls, float(np.logaddexp.reduce(np.log(shares) + worth)))
        self.rises = max(self.rises, bets[-1][0].worth(math.log(left)))
        sums = np.array([drafts, total])
        self._totals += [answers, drafts, total]
        self._squares += np.outer(sums, sums) / answers

    def _inflation(self, answers: int, drafts: int) -> float:
        """Return how much more an answer's sum varies at the server than in the card, at least 1.

        Longer answers vary more: their mean length is taken with what was counted now, as the first poll may hold all
        answers of a week. The variance between the earlier polls also shows lengths that differ more than the card's,
        and answers that come in bursts of a kind.
        """
        longer = ((self._totals[1] + drafts) / (self._totals[0] + answers) / self._mean_drafts) ** 2
        between = 0.0
        if self._begun >= FEWEST_POLLS:
            ratio = np.array([-self._totals[2] / self._totals[1], 1.0])
            # Two standard errors of the variance of n polls are subtracted.
            sure = max(0.0, 1 - 2 * math.sqrt(2 / self._begun))
            between = sure * float(ratio @ self._squares @ ratio) / self._begun / self._falls[0].variance
        return max(1.0, longer, between)
