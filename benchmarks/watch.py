"""How often `draftsmith watch` is wrong, and how soon it is right: python benchmarks/watch.py --head HEAD

Streams of answers are drawn from those of the head's card, and looked at as counters show them: sums by place after
every 20 answers. `card`: the watched card is the one that answers are drawn from. `sample`: it is a sample of it, as
every card is of the traffic. A fall: a part of the drafts comes to nothing.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from draftsmith.eval.watch.command import Card
from draftsmith.eval.watch.evidence import Bets, CardAnswers, Evidence

AT_ONCE = 20
UPPER = {1e-3: 3.0902, 0.9: 1.2816}  # quantiles of the normal distribution


def fallen(card: CardAnswers, fall: float, rng: np.random.Generator) -> CardAnswers:
    """Return the answers with drafts that come to nothing, so that tau falls by a share of it."""
    kept = 1 - fall * card.tau / (card.tau - 1)
    lengths = card.accepted - np.c_[card.accepted[:, 1:], np.zeros(len(card.drafts))]  # [N, K] drafts of each length
    drawn = rng.binomial(lengths.astype(int), kept)
    return CardAnswers(card.drafts, drawn[:, ::-1].cumsum(1)[:, ::-1].astype(float))


def stream(
    card: CardAnswers, source: CardAnswers, drafts: int, level: float, fall: float, rng: np.random.Generator
) -> tuple[float, bool]:
    """Return the drafts after which a fall was found, and whether a test of independent drafts would have found one."""
    evidence, found = Evidence(card), math.inf
    mean, seen, naive = card.by_place[0], np.zeros(2), False
    while seen[0] < drafts:
        picked = rng.integers(0, len(source.drafts), AT_ONCE)
        own = CardAnswers(source.drafts[picked], source.accepted[picked])
        own = fallen(own, fall, rng) if fall else own
        sums = own.accepted.sum(0).astype(int)
        seen += [own.drafts.sum(), sums[0]]
        naive |= seen[1] - mean * seen[0] < -UPPER[1e-3] * math.sqrt(mean * (1 - mean) * seen[0])
        if found == math.inf:
            evidence.add(AT_ONCE, int(own.drafts.sum()), sums.tolist())
            found = seen[0] if evidence.p_fall <= level else found
            if fall and found < math.inf:
                break
    return found, naive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", default="smollm2:eagle3")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--drafts", type=int, default=100_000)
    parser.add_argument("--fall", type=float, default=0.1)
    parser.add_argument("--level", type=float, default=1e-3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for length, card in Card.read(options.head, None).chains.items():
        sizes = {"card": len(card.drafts), "sample": len(card.drafts), "sample of 1,000": 1000, "sample of 4,000": 4000}
        bets = Bets(card.drafts, card.accepted.sum(1), -1)
        deviations = options.fall * card.tau * card.drafts.mean() / math.sqrt(bets.variance)
        needed = (UPPER[1e-3] + UPPER[0.9]) ** 2 / deviations**2
        print(
            f"K={length}: {len(card.drafts)} answers, tau {card.tau:.3f}, variance of the mean over answers "
            f"{bets.variance / card.drafts.mean() / variance_of_rounds(card):.1f} times that of independent drafts"
        )
        for name, size in sizes.items():
            alarms, naive, found = 0, 0, []
            for number in range(options.streams):
                picked = np.arange(size) if name == "card" else rng.integers(0, len(card.drafts), size)
                watched = CardAnswers(card.drafts[picked], card.accepted[picked])
                alarm, simple = stream(watched, card, options.drafts, options.level, 0.0, rng)
                alarms, naive = alarms + (alarm < math.inf), naive + simple
                if number < options.streams // 5:
                    found.append(stream(watched, card, options.drafts, options.level, options.fall, rng)[0])
            fixed = 1 / (1 / needed - 1 / size) * card.drafts.mean() if needed < size else math.inf
            capped = np.minimum(found, options.drafts)
            quantiles = [np.quantile(capped, share) for share in (0.5, 0.9)]
            print(
                f"  {name}: false alarms {alarms} of {options.streams}, of independent drafts {naive}; a fall of "
                f"{options.fall:.0%} found in {np.isfinite(found).mean():.1%} after drafts: mean {capped.mean():,.0f}, "
                f"median {quantiles[0]:,.0f}, 90 % {quantiles[1]:,.0f}; fixed length, power 0.9: {fixed:,.0f}"
            )


def variance_of_rounds(card: CardAnswers) -> float:
    """Return the variance of the accepted tokens of a draft."""
    shares = card.by_place
    second = float(((2 * np.arange(1, len(shares) + 1) - 1) * shares).sum())  # E n^2 from P(n >= i)
    return second - float(shares.sum()) ** 2


if __name__ == "__main__":
    main()
