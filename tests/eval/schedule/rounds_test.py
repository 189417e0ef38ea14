"""Rounds of fewer drafted tokens, worked out from recorded ones: against rounds that are walked one by one, and real
ones of the embedded pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.schedule.rounds import accept_probs, count_rounds, expected_rounds, last_place_rate
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams


def walked(right: tuple[bool, ...], k: int) -> list[dict[str, int]]:
    """Rounds of k tokens, where it is known of every place whether the draft is right there."""
    rounds, place = [], 0
    while place < len(right):
        accepted = next((n for n, ok in enumerate(right[place : place + k]) if not ok), min(k, len(right) - place))
        emitted = min(accepted + 1, len(right) - place)
        rounds.append({"num_drafted": k, "num_accepted": accepted, "num_emitted": emitted})
        place += emitted
    return rounds


@pytest.mark.parametrize("k", range(6))
def test_the_expectation_is_that_over_all_answers(k):
    random = np.random.default_rng(k)
    probs = [0.0, 1.0, *random.uniform(0.05, 0.95, 7)]
    total = 0.0
    for right in itertools.product((False, True), repeat=len(probs)):
        weight = np.prod([p if ok else 1 - p for p, ok in zip(probs, right, strict=True)])
        total += weight * len(walked(right, k))
    assert expected_rounds(probs, k) == pytest.approx(total)


def test_recorded_rounds_come_out_as_they_were():
    random = np.random.default_rng(1)
    rows = []
    for prompt in range(12):
        right = tuple(random.random(random.integers(1, 40)) < random.uniform(0.2, 0.95))
        rows.append({"prompt": prompt, "rounds": walked(right, 4), "places": right})
    rows.append({"prompt": 12, "rounds": []})  # an answer of one token
    counts = count_rounds(rows, 4)
    assert counts.owners == list(range(12))
    assert counts.tokens.tolist() == [len(row["places"]) for row in rows[:12]]
    assert counts.rounds[:, 4] == pytest.approx([len(row["rounds"]) for row in rows[:12]])
    assert counts.rounds[:, 0].tolist() == counts.tokens.tolist() and counts.tokens_per_round[0] == 1
    assert (np.diff(counts.tokens_per_round) > 0).all()


def test_what_is_known_of_a_place_and_what_is_not():
    rounds = [
        {"num_drafted": 2, "num_accepted": 2, "num_emitted": 3},
        {"num_drafted": 2, "num_accepted": 1, "num_emitted": 2},
        {"num_drafted": 2, "num_accepted": 0, "num_emitted": 1},
        {"num_drafted": 1, "num_accepted": 1, "num_emitted": 2},  # it had no more to say
        {"num_drafted": 2, "num_accepted": 2, "num_emitted": 1},  # the answer ends in its draft
    ]
    assert accept_probs(rounds, 2, 0.3) == [1, 1, 0.3, 1, 0, 0, 1, 0, 1]
    assert last_place_rate(rounds, 2) == 2 / 3
    assert last_place_rate(rounds[2:3], 2) == 0


def test_fewer_tokens_are_right_wherever_rounds_begin():
    """Greedy, a draft model: what it says at a place does not depend on the round, so that only places behind drafts
    that were accepted as a whole are guessed."""
    models = Models(load_lm("embedded:target", packed=True), load_lm("embedded:draft", packed=True), capacity=1024)
    prompts = read_prompts("embedded:prompts", "embedded:target", "test", limit=6)
    rows = {k: [] for k in (1, 3, 6)}
    for k, own in rows.items():
        drafter = parse_method(f"spec:k={k}").build(models)
        for number, prompt in enumerate(prompts):
            made = generate_one(models.target, drafter, prompt.prompt_ids, SamplingParams(), 80, TorchSource(0))
            own.append({"prompt": number, "rounds": [vars(step) for step in made.trace.steps]})
    found = count_rounds(rows[6], 6).tokens_per_round
    for k, own in rows.items():
        real = count_rounds(own, k).tokens_per_round[k]
        assert found[k] == pytest.approx(real, rel=0.02)
