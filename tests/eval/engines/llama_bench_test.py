"""`eval schedule --engine llamacpp`: its formula against float64 by hand, and the command with printed times."""

from __future__ import annotations

import json
import random
import stat

import numpy as np
import pytest

from draftsmith.eval.engines.llama_bench import RoundCosts, chain_rows, cut_short
from draftsmith.launch.cli import main

VERIFY = {1: 0.010, 2: 0.016, 3: 0.018, 4: 0.020, 6: 0.026}


def test_speed_is_tokens_over_the_time_of_calls_steps_and_the_rest():
    """Every token is accepted with 0.7: a round of k has 1 + 0.7 + ... + 0.7^k tokens."""
    costs = RoundCosts(VERIFY, overhead_s=0.002, step_s=0.001)
    taus = np.array([sum(0.7**place for place in range(k + 1)) for k in range(6)])
    rows = chain_rows(costs, 5, [0, 1], np.array([60.0, 60.0]), np.stack([60 / taus] * 2))
    seconds = [0.012, 0.016 + 0.003, 0.018 + 0.004, 0.020 + 0.005, 0.023 + 0.006, 0.026 + 0.007]
    assert [row["n_max"] for row in rows] == [1, 2, 3, 4, 5]
    for k, row in enumerate(rows, start=1):
        assert row["pays_above"] == pytest.approx(seconds[k] / seconds[0])
        assert row["speedup"] == pytest.approx(taus[k] / (seconds[k] / seconds[0]))
        assert row["speedup_ci95"] == pytest.approx([row["speedup"]] * 2)


def test_a_threshold_refuses_a_token_after_its_step_was_paid():
    rounds = [
        {"num_accepted": 2, "q_top10": [0.9, 0.8, 0.3]},  # p-min 0.5 refuses the third: 3 tokens, 2 read, 3 steps
        {"num_accepted": 0, "q_top10": [0.4, 0.9, 0.9]},  # refuses all: 1 token, 0 read, 1 step
        {"num_accepted": 3, "q_top10": [0.9, 0.9, 0.9]},  # 4 tokens, 3 read, 3 steps
    ]
    assert cut_short(rounds, 3, 0.5).tolist() == [8, 5, 7]
    assert cut_short(rounds, 2, 0.5).tolist() == [7, 4, 5]
    assert cut_short(rounds, 3, 0.0).tolist() == [8, 9, 9]


def test_a_threshold_is_advised_where_probabilities_tell_accepted_tokens():
    draws = random.Random(0)
    rounds = []
    for _ in range(400):
        accepted = next((place for place in range(5) if draws.random() > 0.5), 5)
        rounds.append({"num_accepted": accepted, "q_top10": [0.95] * accepted + [0.1] * (5 - accepted)})
    count = np.array([400.0 + sum(min(one["num_accepted"], k) for one in rounds) for k in range(6)])
    tokens = np.array([float(count[5])])
    known = ([0], tokens, (400 * count[5] / count)[None], rounds)
    costs = RoundCosts(VERIFY, step_s=0.001)
    best = max(chain_rows(costs, 5, *known), key=lambda row: row["speedup"])
    # A perfect threshold reads accepted tokens alone: n + 1 calls of one token are never cheaper than one of n.
    lengths = [one["num_accepted"] for one in rounds]
    seconds = costs.at(np.mean(lengths), np.mean([min(length + 1, 5) for length in lengths]))
    assert (best["n_max"], best["p_min"]) == (5, 0.2)
    assert best["speedup"] == pytest.approx((1 + np.mean(lengths)) * 0.010 / seconds)


def test_the_acceptance_from_which_drafts_pay_needs_no_run(tmp_path, capsys):
    (tmp_path / "target.gguf").touch()
    (tmp_path / "llama-server").touch()
    rows = [{"n_prompt": size, "n_gen": 0, "avg_ns": int(1e9 * VERIFY.get(size, 0.5))} for size in (1, 2, 3, 4, 6, 9)]
    bench = tmp_path / "llama-bench"
    bench.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    bench.chmod(bench.stat().st_mode | stat.S_IXUSR)
    words = ["eval", "schedule", "--engine", "llamacpp", "--target", str(tmp_path / "target.gguf")]
    words += ["--engine-path", str(tmp_path / "llama-server"), "--output", str(tmp_path / "out")]
    assert main(words) == 2  # sizes that were asked for are missing
    rows += [{"n_prompt": size, "n_gen": 0, "avg_ns": int(1e9 * 0.023)} for size in (5, 8)]
    bench.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 16.0 1.60 2 18.0 1.80" in shown and "never" in shown and "as if they cost nothing" in shown
