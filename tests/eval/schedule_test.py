"""`eval schedule`: choices against all others, rounds against walked and real ones, and the command end to end."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from draftsmith.eval.bench.compare import open_bench
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.schedule import (
    RoundCounts,
    RoundTimes,
    accept_probs,
    choose,
    count_rounds,
    expected_rounds,
    ranges,
    read_times,
    recorded_chain,
)
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

SECONDS = {"1": {"0": 0.010, "3": 0.011}, "4": {"0": 0.012, "3": 0.020}, "16": {"0": 0.016, "3": 0.056}}


def times_of(plain, per_token, per_draft=0.0, sizes=(1, 2, 4, 8, 16), longest=5) -> RoundTimes:
    """Rounds that take `plain`, `per_draft` for each drafted token, and `per_token` for each token that is read."""
    seconds = {
        size: {k: plain + k * per_draft + size * (k + 1) * per_token for k in range(longest + 1)} for size in sizes
    }
    return RoundTimes(seconds, "by hand")


def counts_of(tau, prompts=30, seed=0) -> RoundCounts:
    """Answers of 60 tokens with these tokens per round, and a little noise between prompts."""
    noise = np.random.default_rng(seed).normal(1, 0.1, (prompts, 1))
    rounds = 60 / np.array(tau)[None] * np.where(np.arange(len(tau)) > 0, noise, 1.0)
    rounds *= 60 / np.array(tau) / rounds.mean(0)
    return RoundCounts(list(range(prompts)), np.full(prompts, 60.0), rounds)


def test_a_schedule_worked_out_by_hand():
    """With 1, 1.5, 1.75 tokens per round that takes 10 and one more for each token read: K = 2 beats K = 1 while
    1.75 / 1.5 > (10 + 3 B) / (10 + 2 B), for B < 2.5; K = 1 beats none while 1.5 > (10 + 2 B) / (10 + B), for B < 10.
    """
    times = RoundTimes({1: {0: 11, 1: 12, 2: 13}, 16: {0: 26, 1: 42, 2: 58}}, "by hand")
    schedule = choose(0.0, counts_of([1, 1.5, 1.75]), times)
    assert ranges(schedule.lengths) == [(1, 2, 2), (3, 9, 1), (10, 16, 0)]
    assert schedule.advice.startswith("Do not speculate above 9 requests at once. More than 2 tokens may pay")
    assert schedule.rows[0]["over_none"] == pytest.approx(1.75 / 13 * 11 - 1)
    assert schedule.rows[1]["over_none"] == 0 and schedule.rows[1]["k"] == 0
    # At least 1 token: K = 1 wherever none is best.
    assert ranges(schedule.drafting) == [(1, 2, 2), (3, 16, 1)]
    # Over both sizes: K = 1 gives 1.375 and 0.929, K = 2 1.481 and 0.785 of the rate without drafts.
    assert schedule.single == 1
    gain = 42 / 26 / 1.5 - 1
    assert schedule.rows[1]["over_single"] == pytest.approx(gain)
    low, high = schedule.rows[1]["over_single_ci95"]
    assert low < gain < high


def test_every_choice_is_the_best_of_all():
    random = np.random.default_rng(3)
    for _ in range(20):
        tau = np.cumsum([1, *np.sort(random.uniform(0, 1, 5))[::-1]])
        seconds = {size: dict(enumerate(np.cumsum(random.uniform(0.1, 1, 6)) + 3)) for size in (1, 3, 8)}
        times = RoundTimes(seconds, "random")
        schedule = choose(0.0, counts_of(tau), times)
        for size, k in enumerate(schedule.lengths, start=1):
            speeds = [tau[length] / times.at(size, length) for length in range(6)]
            assert speeds[k] == pytest.approx(max(speeds))
            assert speeds[schedule.drafting[size - 1]] == pytest.approx(max(speeds[1:]))
        # No schedule of the timed sizes has a higher mean, and no single K than the one that is named.
        rate = np.array([[tau[k] / times.at(size, k) for k in range(6)] for size in seconds])
        best = max(np.log(rate[range(3), list(ks)]).mean() for ks in itertools.product(range(6), repeat=3))
        chosen = [schedule.lengths[size - 1] for size in seconds]
        assert np.log(rate[range(3), chosen]).mean() == pytest.approx(best)
        assert np.log(rate).mean(0).argmax() == schedule.single


def test_free_drafts_are_as_long_as_was_timed_and_costly_ones_are_not_made():
    rising = [1, 1.5, 1.8, 1.9]
    free = choose(0.0, counts_of(rising), times_of(10, 0.0, longest=2))
    assert ranges(free.lengths) == [(1, 16, 2)] and "pays up to 16 requests" in free.advice
    assert free.rows[0]["over_single"] == 0 and free.rows[0]["over_single_ci95"] == [0, 0]
    costly = choose(0.0, counts_of(rising), times_of(10, 0.0, per_draft=9))
    assert ranges(costly.lengths) == [(1, 16, 0)]
    assert costly.advice == "Do not speculate: it pays at no number of requests up to 16."
    assert ranges([3, 3, 1, 3]) == [(1, 2, 3), (3, 3, 1), (4, 4, 3)]


def test_the_smallest_of_equally_fast_lengths_is_chosen():
    counts = RoundCounts([0, 1], np.array([60.0, 60.0]), np.array([[60.0, 30.0, 30.0]] * 2))
    assert list(choose(0.0, counts, RoundTimes({1: {0: 1.0, 1: 1.0, 2: 1.0}}, "by hand")).lengths) == [1]


def walked(right: tuple[bool, ...], k: int) -> list[dict[str, int]]:
    """Rounds of k tokens over places where the draft is right or wrong."""
    rounds, place = [], 0
    while place < len(right):
        accepted = next((n for n, ok in enumerate(right[place : place + k]) if not ok), min(k, len(right) - place))
        emitted = min(accepted + 1, len(right) - place)
        rounds.append({"num_drafted": k, "num_accepted": accepted, "num_emitted": emitted})
        place += emitted
    return rounds


@pytest.mark.parametrize("k", [0, 1, 4])
def test_expected_rounds_are_the_mean_over_all_outcomes(k):
    probs = [0.0, 1.0, *np.random.default_rng(k).uniform(0.05, 0.95, 7)]
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
    assert counts.rounds[:, 0].tolist() == counts.tokens.tolist()
    assert (np.diff(counts.rounds.sum(0)) < 0).all()


def test_acceptance_of_a_place_is_unknown_only_after_a_full_draft():
    rounds = [
        {"num_drafted": 2, "num_accepted": 2, "num_emitted": 3},
        {"num_drafted": 2, "num_accepted": 1, "num_emitted": 2},
        {"num_drafted": 2, "num_accepted": 0, "num_emitted": 1},
        {"num_drafted": 1, "num_accepted": 1, "num_emitted": 2},  # the drafter stopped
        {"num_drafted": 2, "num_accepted": 2, "num_emitted": 1},  # the answer ends inside the draft
    ]
    assert accept_probs(rounds, 2, 0.3) == [1, 1, 0.3, 1, 0, 0, 1, 0, 1]


def test_rounds_of_a_smaller_k_agree_with_real_ones():
    """A greedy draft model: its draft at a place does not depend on the round, so only unknown places are estimated."""
    models = Models(load_lm("embedded:target", packed=True), load_lm("embedded:draft", packed=True), capacity=1024)
    prompts = read_prompts("embedded:prompts", "embedded:target", "test", limit=6)
    rows = {k: [] for k in (1, 3, 6)}
    for k, answers in rows.items():
        drafter = parse_method(f"spec:k={k}").build(models)
        for number, prompt in enumerate(prompts):
            answer = generate_one(models.target, drafter, prompt.prompt_ids, SamplingParams(), 80, TorchSource(0))
            answers.append({"prompt": number, "rounds": [vars(step) for step in answer.trace.steps]})
    expected = count_rounds(rows[6], 6)
    for k, answers in rows.items():
        real = count_rounds(answers, k)
        tau, real_tau = (each.tokens.sum() / each.rounds[:, k].sum() for each in (expected, real))
        assert tau == pytest.approx(real_tau, rel=0.02)


@pytest.fixture(scope="module")
def bench(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("schedule") / "bench"
    words = ["eval", "bench", "--target", models["target"], "--draft", models["draft"], "--prompts", models["prompts"]]
    words += ["--methods", "spec:k=3,spec:k=2,online:c=0.1", "--split", "test", "--ignore-eos"]
    words += ["--temperatures", "0,1", "--batch-size", "2", "--max-new-tokens", "24", "--repeats", "1"]
    assert main([*words, "--output", str(output)]) == 0
    return output


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"seconds": SECONDS, "machine": "a table by hand"}))
    return path


def test_files_hold_the_printed_schedule(bench, costs, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "vllm-T0.7.json").write_text("left by an earlier run")
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--costs", str(costs), "--output", str(out)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    results = json.loads((out / "results.json").read_text())
    assert [table["name"] for table in results["tables"]] == ["schedule-T0", "schedule-T1"]
    assert results["meta"]["kind"] == "schedule" and results["meta"]["costs"] == "a table by hand"
    assert not (out / "vllm-T0.7.json").exists()
    times, methods = read_times(costs), open_bench(str(bench)).methods
    for number, temperature in enumerate((0.0, 1.0)):
        schedule = choose(temperature, count_rounds(methods[temperature]["spec:k=3"], 3), times)
        assert results["schedules"][number]["ranges"] == [list(part) for part in ranges(schedule.lengths)]
        assert schedule.advice in printed and results["schedules"][number]["advice"] == schedule.advice
        written = {name: json.loads((out / f"{name}-T{temperature:g}.json").read_text()) for name in ("vllm", "sglang")}
        assert 0 in schedule.lengths and "(vllm#49548)" in printed
        assert written["vllm"] == {
            "num_speculative_tokens": max(schedule.drafting),
            "num_speculative_tokens_per_batch_size": [list(part) for part in ranges(schedule.drafting)],
        }
        steps = {str(first): {"candidate_steps": [k]} for first, _, k in ranges(schedule.lengths)}
        assert written["sglang"] == steps


def test_no_server_files_where_drafting_never_pays(bench, tmp_path, capsys):
    path = tmp_path / "costly.json"
    path.write_text(json.dumps({"seconds": {"1": {"0": 0.01, "3": 0.1}}}))
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--costs", str(path)]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert "Do not speculate: it pays at no number" in capsys.readouterr().out.replace("\n", " ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_one_of_several_chains_has_to_be_named(bench, costs, tmp_path, capsys):
    assert main(["eval", "schedule", str(bench), "--costs", str(costs), "--output", str(tmp_path / "out")]) == 2
    assert "expected one of spec:k=2, spec:k=3. Name it with --method." in capsys.readouterr().err


def test_rounds_of_a_block_say_nothing_of_a_shorter_one():
    run = SimpleNamespace(methods={0.0: {"dspark:k=7": []}}, name="run")
    with pytest.raises(InputError, match="method: found dspark:k=7, expected a drafter that draws a token after the"):
        recorded_chain(run, None)


def test_times_are_interpolated_linearly(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"seconds": {"4": {"4": 0.5, "0": 0.3}, "1": {"0": 0.1, "2": 0.2}}}))
    times = read_times(path)
    assert times.at(1, 1) == pytest.approx(0.15) and times.at(4, 1) == pytest.approx(0.35)
    assert times.at(2, 1) == pytest.approx(0.15 + 0.2 / 3)
