"""The test of counters against a card: answers that it was made from, others of their kind, and falls."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from draftsmith.eval.watch.evidence import Bets, CardAnswers, Evidence

PLACES, AT_ONCE = 3, 20


def answers(count: int, rng: np.random.Generator, fall: float = 0.0) -> CardAnswers:
    """Answers of unlike tasks, whose drafts are alike. fall: share of tau that is lost: drafts come to nothing."""
    rates = rng.choice([0.35, 0.5, 0.7, 0.8], count)
    drafts = rng.integers(10, 60, count)
    mean = 1 + float(np.mean([rate + rate**2 + rate**3 for rate in (0.35, 0.5, 0.7, 0.8)]))
    kept = 1 - fall * mean / (mean - 1)
    accepted = np.zeros((count, PLACES))
    for number, (rate, own) in enumerate(zip(rates, drafts, strict=True)):
        lengths = (rng.random((own, PLACES)) < rate).cumprod(1).sum(1) * (rng.random(own) < kept)
        accepted[number] = (lengths[:, None] > np.arange(PLACES)).sum(0)
    return CardAnswers(drafts.astype(float), accepted)


def alarm(card: CardAnswers, served: CardAnswers, level: float) -> int | None:
    """Answers after which a fall is found, looking after every AT_ONCE of them; None if it never is."""
    evidence = Evidence(card)
    for start in range(0, len(served.drafts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        evidence.add(AT_ONCE, int(served.drafts[part].sum()), served.accepted[part].sum(0).astype(int).tolist())
        if evidence.p_fall <= level:
            return start + AT_ONCE
    return None


def test_a_bet_is_worth_what_its_formula_says():
    card = answers(200, np.random.default_rng(0))
    sums = card.accepted.sum(1)
    bets = Bets(card.drafts, sums, -1)
    served, drafts, accepted, begun = 7, 200.0, 150.0, math.log(0.5)
    bets.add(served, drafts, accepted, 1.0, begun)
    mean = sums.sum() / card.drafts.sum()
    noise = sums - mean * card.drafts
    for fall, share, stakes in zip((0.05, 0.1, 0.2, 0.4), (0.3, 0.4, 0.2, 0.1), bets.stakes, strict=True):
        strength = -fall * (1 + mean) * card.drafts.mean() / noise.var(ddof=1)
        worth = strength * (accepted - mean * drafts) - served * math.log(np.exp(strength * noise).mean())
        assert stakes[len(stakes) // 2] == pytest.approx(math.log(share) + begun + worth)


def test_healthy_streams_raise_no_alarm_where_a_test_of_independent_drafts_does():
    rng, level, streams = np.random.default_rng(1), 0.05, 150
    false, independent = 0, 0
    for _ in range(streams):
        card, served = answers(100, rng), answers(600, rng)
        false += alarm(card, served, level) is not None
        rates = [own.accepted[:, 0].sum() / own.drafts.sum() for own in (card, served)]
        variance = sum(rates[0] * (1 - rates[0]) / own.drafts.sum() for own in (card, served))
        independent += (rates[0] - rates[1]) / math.sqrt(variance) > 1.645
    assert false <= level * streams + 3 * math.sqrt(level * streams)
    # Looking once, at the end, it is wrong many times as often as it says.
    assert independent > 4 * level * streams


def test_longer_answers_of_unequal_lengths_raise_no_alarm():
    rng = np.random.default_rng(2)
    for _ in range(40):
        card, served = answers(100, rng), answers(600, rng)
        longer = rng.integers(1, 9, 600)
        longer = CardAnswers(served.drafts * longer, served.accepted * longer[:, None])
        assert alarm(card, longer, 0.01) is None


def test_a_fall_is_found_with_the_tokens_of_the_best_test_of_a_fixed_length():
    rng, level = np.random.default_rng(3), 1e-3
    found = []
    for _ in range(30):
        card = answers(1000, rng)
        found.append(alarm(card, answers(3000, rng, fall=0.1), level) or math.inf)
    bets = Bets(card.drafts, card.accepted.sum(1), -1)
    deviations = 0.1 * card.tau * card.drafts.mean() / math.sqrt(bets.variance)
    # One-sided at this level, with power 0.9.
    fixed = ((3.09 + 1.28) / deviations) ** 2
    fixed = 1 / (1 / fixed - 1 / 1000)
    assert np.mean(found) <= 1.5 * fixed


def test_a_late_fall_is_found_and_a_rise_is_none():
    rng = np.random.default_rng(4)
    card, healthy, fallen = answers(500, rng), answers(2000, rng), answers(1000, rng, fall=0.2)
    late = CardAnswers(
        *(np.concatenate(own) for own in zip(*(vars(each).values() for each in (healthy, fallen)), strict=True))
    )
    found = alarm(card, late, 1e-3)
    assert found is not None and 2000 < found < 2600
    evidence = Evidence(fallen)
    evidence.add(2000, int(healthy.drafts.sum()), healthy.accepted.sum(0).astype(int).tolist())
    assert evidence.p_fall == 1.0 and evidence.p_rise < 1e-3


def test_evidence_goes_on_where_it_was_saved():
    rng = np.random.default_rng(5)
    card, served = answers(100, rng), answers(200, rng, fall=0.1)
    whole, halves = Evidence(card), Evidence(card)
    for start in range(0, 200, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        counts = AT_ONCE, int(served.drafts[part].sum()), served.accepted[part].sum(0).astype(int).tolist()
        # A server that counts no places in between.
        counts = (*counts[:2], [sum(counts[2])]) if start == 60 else counts
        saved, halves = json.dumps(halves.to_json(), allow_nan=False), Evidence(card)
        halves.restore(json.loads(saved))
        for each in (whole, halves):
            each.add(*counts)
    assert halves.p_fall == whole.p_fall < 1 and halves.p_rise == whole.p_rise
