"""Simulate false alarms and delays of `draftsmith watch`: python benchmarks/watch.py --head HEAD

Streams of answers are drawn from those of the head's card, and looked at as counters show them: sums by place after
every 20 answers. `card`: the watched card is the one that answers are drawn from. `sample`: it is a sample of it, as
every card is of the traffic. tau falls in two ways: drafts that come to nothing, in all answers alike; and more answers
of the kinds whose drafts are accepted least. The best test of a fixed length, of tau with the card's variance, is given
the drafts with which it finds nine of ten.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from draftsmith.eval.watch.command import Card
from draftsmith.eval.watch.evidence import Bets, CardAnswers, Evidence, Floats

AT_ONCE = 20
UPPER = {1e-3: 3.0902, 0.9: 1.2816}  # quantiles of the normal distribution


def fallen(card: CardAnswers, fall: float, rng: np.random.Generator, tau: float) -> CardAnswers:
    """Return the answers with drafts that come to nothing, by which a tau falls by a share of it."""
    lengths = card.accepted - np.c_[card.accepted[:, 1:], np.zeros(len(card.drafts))]  # [N, K] drafts of each length
    drawn = rng.binomial(lengths.astype(int), 1 - fall * tau / (tau - 1))
    return CardAnswers(card.drafts, drawn[:, ::-1].cumsum(1)[:, ::-1].astype(float))


def tilted(card: CardAnswers, fall: float) -> Floats:
    """Return how often each answer comes, [N], if answers that are accepted less come more, by which tau falls."""
    rates = card.accepted.sum(1) / card.drafts
    low, high = 0.0, 100.0
    for _ in range(60):
        weights = np.exp(-(low + high) / 2 * rates)
        tau = 1 + float(weights @ card.accepted.sum(1) / (weights @ card.drafts))
        low, high = ((low + high) / 2, high) if tau > (1 - fall) * card.tau else (low, (low + high) / 2)
    return weights / weights.sum()


def stream(
    card: CardAnswers, source: CardAnswers, options: argparse.Namespace, rng: np.random.Generator, fall: str = ""
) -> tuple[float, bool]:
    """Return the drafts after which a fall was found, and whether a test of independent drafts would have found one."""
    evidence, found = Evidence(card), math.inf
    mean, seen, naive = card.by_place[0], np.zeros(2), False
    often = tilted(source, options.fall) if fall == "mix" else None
    while seen[0] < options.drafts:
        picked = rng.choice(len(source.drafts), AT_ONCE, p=often)
        own = CardAnswers(source.drafts[picked], source.accepted[picked])
        own = fallen(own, options.fall, rng, source.tau) if fall == "drafts" else own
        sums = own.accepted.sum(0).astype(int)
        seen += [own.drafts.sum(), sums[0]]
        naive |= seen[1] - mean * seen[0] < -UPPER[1e-3] * math.sqrt(mean * (1 - mean) * seen[0])
        if found == math.inf:
            evidence.add(AT_ONCE, int(own.drafts.sum()), sums.tolist())
            found = seen[0] if evidence.p_fall <= 1e-3 else found
            if fall and found < math.inf:
                break
    return found, naive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", default="smollm2:eagle3")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--drafts", type=int, default=100_000)
    parser.add_argument("--fall", type=float, default=0.1)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for length, card in Card.read(options.head, None).chains.items():
        count = len(card.drafts)
        bets = Bets(card.drafts, card.accepted.sum(1), -1)
        inflated = bets.variance / card.drafts.mean() / variance_of_rounds(card)
        deviations = options.fall * card.tau * card.drafts.mean() / math.sqrt(bets.variance)
        needed = (UPPER[1e-3] + UPPER[0.9]) ** 2 / deviations**2
        print(
            f"K={length}: {count} answers, tau {card.tau:.3f}, whose mean varies {inflated:.1f} times as much as that"
        )
        print("of independent drafts")
        for name, size in {"card": count, "sample": count, "sample of 1,000": 1000, "sample of 4,000": 4000}.items():
            alarms, naive = 0, 0
            found: dict[str, list[float]] = {"drafts": [], "mix": []}
            for number in range(options.streams):
                picked = np.arange(size) if name == "card" else rng.integers(0, count, size)
                watched = CardAnswers(card.drafts[picked], card.accepted[picked])
                alarm, simple = stream(watched, card, options, rng)
                alarms, naive = alarms + (alarm < math.inf), naive + simple
                for fall, own in found.items() if number < options.streams // 5 else ():
                    own.append(stream(watched, card, options, rng, fall)[0])
            fixed = 1 / (1 / needed - 1 / size) * card.drafts.mean() if needed < size else math.inf
            print(f"  {name}: false alarms {alarms} of {options.streams}, of independent drafts {naive}")
            for fall, own in found.items():
                capped = np.minimum(own, options.drafts)
                median, most = np.quantile(capped, 0.5), np.quantile(capped, 0.9)
                print(
                    f"    fall by {fall}: found in {np.isfinite(own).mean():.1%}, after drafts: mean "
                    f"{capped.mean():,.0f}, median {median:,.0f}, 90 % {most:,.0f}; a fixed length {fixed:,.0f}"
                )


def variance_of_rounds(card: CardAnswers) -> float:
    """Return the variance of the accepted tokens of a draft."""
    shares = card.by_place
    second = float(((2 * np.arange(1, len(shares) + 1) - 1) * shares).sum())  # E n^2 from P(n >= i)
    return second - float(shares.sum()) ** 2


if __name__ == "__main__":
    main()
