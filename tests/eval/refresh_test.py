"""What two runs of the bench say of a head: by hand, and by an own bootstrap."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from draftsmith.data.screen import print_table
from draftsmith.eval.bench.compare import Bench
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import Row, row_of
from draftsmith.eval.refresh import (
    LEAST_PROMPTS,
    RefreshConfig,
    gains,
    overall,
    paid_after,
    prompts_needed,
    tables_of,
    verdict_line,
    verdict_of,
)
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace

METHOD = "eagle:k=3"
META = {"settings": dict.fromkeys(("top_k", "top_p", "dtype", "max_new_tokens", "ignore_eos", "turns", "batch_size")),
        "target": {"config": "a"}, "prompts": {"sha256": "b"}, "clock": "cpu"}  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "prompts", "verdict"),
    [
        ([0.90, 0.99], 40, "worse"),
        ([0.90, 0.9999], 40, "worse"),
        ([0.90, 1.0], 40, "not worth it"),  # no gain of two per cent is among them
        ([0.99, 1.019], 40, "not worth it"),
        ([1.001, 1.019], 40, "not worth it"),  # better, and too little
        ([1.001, 1.021], 40, "cannot tell"),
        ([1.019, 1.3], 40, "cannot tell"),
        ([1.021, 1.3], 40, "worth it"),
        ([1.2, 1.3], 40, "worth it"),
        ([1.0, 1.3], 40, "cannot tell"),
        ([0.9, 1.3], 40, "cannot tell"),
        ([1.2, 1.3], LEAST_PROMPTS, "worth it"),
        ([1.2, 1.3], LEAST_PROMPTS - 1, "cannot tell"),
        ([0.8, 0.9], LEAST_PROMPTS - 1, "cannot tell"),
        (None, 40, "cannot tell"),
    ],
)
def test_an_interval_and_its_verdict(gain, prompts, verdict):
    assert verdict_of(gain, prompts, worth=0.02) == verdict


def test_what_counts_as_a_gain_is_a_setting():
    found = [verdict_of([1.01, 1.03], 40, worth) for worth in (0.0, 0.009, 0.02, 0.031)]
    assert found == ["worth it", "worth it", "cannot tell", "not worth it"]


def test_a_head_that_is_worse_at_one_temperature_is_not_recommended():
    order = ["worse", "worth it", "cannot tell", "not worth it"]
    for pair in itertools.product(order, repeat=2):
        assert overall(pair) == min(pair, key=order.index)


def test_how_many_prompts_would_tell():
    # Half the width is 0.1; around 1.07 it has to end 0.05 away, above 1.02: twice as narrow.
    assert prompts_needed(1.07, [0.97, 1.17], 40, worth=0.02) == pytest.approx(40 * 4, abs=1)  # rounded up
    # Around 0.98 it has to end below 1.02, 0.04 away.
    assert prompts_needed(0.98, [0.9, 1.06], 40, worth=0.02) == pytest.approx(40 * 4, abs=1)
    assert prompts_needed(1.5, [1.0, 2.0], 3, worth=0.02) == LEAST_PROMPTS
    assert prompts_needed(1.5, None, 1, worth=0.02) is None


def answer(number: int, rounds: list[tuple[int, int]], method: str = METHOD, cpu_s: float = 1.0) -> Row:
    """One prefill token, and rounds of (drafted, accepted) tokens, each with one of the target's own."""
    steps = [DecodeStep(drafted, accepted, accepted + 1, drafted) for drafted, accepted in rounds]
    tokens = list(range(1 + sum(step.num_emitted for step in steps)))
    made = Generation(tokens, DecodeTrace(steps, prefill_emitted=1), False)
    return row_of(BenchPrompt(str(number), [number], number=number), number, method, 0.0, made, [cpu_s], [cpu_s])


def bench(*answers: list[tuple[int, int]], cpu_s: float = 1.0) -> Bench:
    rows = [answer(number, rounds, cpu_s=cpu_s) for number, rounds in enumerate(answers)]
    return Bench("run", META, [*rows, *(answer(row["prompt"], [(0, 0)] * 7, "ar", 4.0) for row in rows)])


def config(**changes) -> RefreshConfig:
    return RefreshConfig(Path("head"), "t", Path("data"), "prompts", Path("out"), **changes)


BEFORE = [[(3, 0), (3, 1), (3, 3)], [(3, 1), (1, 1)]]
AFTER = [[(3, 3), (3, 3)], [(3, 2), (1, 0)]]


def test_tau_and_acceptance_by_depth_by_hand():
    (found,) = gains(bench(*BEFORE), bench(*AFTER, cpu_s=0.5), METHOD, config(), set())
    # Before: 1+1+2+4 and 1+2+2 tokens in 4 and 3 calls. After: 1+4+4 and 1+3+1 tokens in 3 and 3.
    assert (found["tau_before"], found["tau_after"]) == (13 / 7, 14 / 6)
    assert found["gain"] == pytest.approx(14 / 6 * 7 / 13)
    # Resamples are one prompt twice, the other twice, or both.
    assert found["tau_before_ci95"] == pytest.approx([5 / 3, 8 / 4])
    assert found["gain_ci95"] == pytest.approx([(5 / 3) / (5 / 3), (9 / 3) / (8 / 4)])
    first, second, third = found["accepted"]
    # Round by round, where those before were accepted: token 1 of all, token 2 where one was, token 3 where two were.
    assert (first["before"], second["before"], third["before"]) == (4 / 5, 1 / 3, 1 / 1)
    assert (first["after"], second["after"], third["after"]) == (3 / 4, 3 / 3, 2 / 3)
    assert first["difference_ci95"] == pytest.approx([1 / 2 - 2 / 2, 2 / 2 - 2 / 3])
    assert found["verdict"] == "cannot tell" and found["prompts"] == 2
    # Two prompts of `ar` take 8 s for 16 tokens: 2 tokens/s. The head's 13 took 2 s, and its 14 take 1 s.
    assert (found["ar_tokens_per_s"], found["speedup_before"]) == (2.0, pytest.approx(6.5 / 2))
    assert found["speedup_after"] == pytest.approx(14 / 2)
    saved = 2 / 13 - 1 / 14  # seconds a token
    assert paid_after(found, 100.0) == pytest.approx(100 / saved)
    assert paid_after({**found, "speedup_after": found["speedup_before"]}, 100.0) is None


def test_a_depth_that_was_never_reached_has_no_number():
    (found,) = gains(bench([(3, 0)], [(3, 0)]), bench([(3, 3)], [(3, 3)]), METHOD, config(), set())
    assert [part["before"] for part in found["accepted"]] == [0.0, None, None]
    assert found["accepted"][2]["difference_ci95"] is None


def test_prompts_of_the_data_do_not_count():
    more = ([*BEFORE, [(3, 0)] * 50], [*AFTER, [(3, 3)] * 50])
    all_three, without = (gains(bench(*more[0]), bench(*more[1]), METHOD, config(), seen)[0] for seen in (set(), {2}))
    (two,) = gains(bench(*BEFORE), bench(*AFTER), METHOD, config(), set())
    assert without == two and all_three["gain"] > without["gain"]


def test_the_interval_is_of_pairs_and_agrees_with_an_own_bootstrap():
    rng = np.random.default_rng(3)
    hard = rng.uniform(0.2, 0.9, 60)  # prompts differ far more than the heads do
    before = [[(3, int(n)) for n in rng.binomial(3, p, 12)] for p in hard]
    after = [[(3, min(3, n + int(rng.random() < 0.3))) for _, n in rounds] for rounds in before]
    (found,) = gains(bench(*before), bench(*after), METHOD, config(), set())
    tokens, calls = (np.array([[f(r) for r in run] for run in (before, after)]) for f in
                     (lambda rounds: 1 + sum(n + 1 for _, n in rounds), lambda rounds: 1 + len(rounds)))  # fmt: skip
    picks = rng.integers(60, size=(4000, 60))
    taus = tokens[:, picks].sum(-1) / calls[:, picks].sum(-1)
    wanted = np.percentile(taus[1] / taus[0], [2.5, 97.5])
    assert np.allclose(found["gain_ci95"], wanted, atol=0.01)  # two bootstraps of some thousand draws
    assert found["verdict"] == "worth it" and wanted[0] > 1.02
    apart = np.percentile(taus[1] / np.roll(taus[0], 1), [2.5, 97.5])  # other prompts before than after
    assert np.ptp(found["gain_ci95"]) < 0.6 * np.ptp(apart)


def test_the_tables_and_the_sentence():
    found = gains(bench(*BEFORE), bench(*AFTER), METHOD, config(), set())
    json.dumps(found)
    console = Console(width=80, file=io.StringIO())
    for table in tables_of(found, METHOD):
        print_table(console, table)
    text = console.file.getvalue()
    assert "1.86" in text and "2.33" in text and "1.26x" in text and "cannot tell" in text and "2 held-out" in text
    said = verdict_line("cannot tell", found, 0.02)
    assert said.startswith("Cannot tell with so few prompts (2; about ") and said.endswith("keep the head as it was.")
    lines = {verdict: verdict_line(verdict, found, 0.02) for verdict in ("worse", "worth it", "not worth it")}
    assert "take the head that was trained on" in lines["worth it"] and "less than 2.0%" in lines["not worth it"]
    assert all("keep the head as it was" in lines[name].lower() for name in ("worse", "not worth it"))
