"""Numbers, files and tables of a bench, against numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from draftsmith.benchmarks.measured import markdown
from draftsmith.eval.bench.measuring import Journal
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import (
    PER_PROMPT,
    Resamples,
    Rounds,
    Row,
    classes_of_rounds,
    failures_of,
    of_methods,
    read_rows,
    row_of,
    summarize,
    write_rows,
)
from draftsmith.eval.bench.tables import part_tables, results_tables
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.types import InputError


def measured(
    tokens: list[int], steps: list[DecodeStep], cpu_s: float, wall_s: float, task: str = "", group: int = 0
) -> Row:
    made = Generation(tokens, DecodeTrace(steps, prefill_emitted=1), False)
    return row_of(BenchPrompt("id", [1, 2], task, number=group), "ar", 0.0, made, [wall_s], [cpu_s])


AR = [
    measured([1, 2, 3], [DecodeStep(0, 0, 1, 0)] * 2, cpu_s=3.0, wall_s=6.0, task="a"),
    measured([4, 5, 6, 7], [DecodeStep(0, 0, 1, 0)] * 3, cpu_s=5.0, wall_s=9.0, task="b", group=1),
]
# Prompt 1: prefill emits 1; a round drafts 4, accepts 1, emits 2. Prompt 2: prefill 1; drafts 2, accepts 2, emits 3.
SPEC = [
    measured([1, 2, 3], [DecodeStep(4, 1, 2, 4)], cpu_s=1.0, wall_s=4.0, task="a"),
    measured([4, 5, 6, 7], [DecodeStep(2, 2, 3, 2)], cpu_s=3.0, wall_s=5.0, task="b", group=1),
]


def test_a_row_holds_sums_and_ratios_of_sums():
    row = summarize({"ar": AR, "spec": SPEC}, "cpu", seed=0, compare=True)[1]
    assert (row["method"], row["prompts"], row["tokens"]) == ("spec", 2, 7)
    assert (row["wall_s"], row["cpu_s"]) == (9.0, 4.0)
    assert row["tokens_per_s"] == 7 / 4
    assert row["speedup"] == (7 / 4) / (7 / 8)
    assert (row["num_target_calls"], row["num_draft_tokens"], row["num_accepted"]) == (4, 6, 3)
    assert row["num_discarded"] == 6 + 4 - 7
    assert row["tau"] == 7 / 4 and row["discard_rate"] == 3 / 7 and row["verification_rate"] == 4 / 7
    assert row["matches_ar"] is True and row["num_differing"] == 0
    a, b = row["by"]["task"]
    assert (a["name"], b["name"]) == ("a", "b") and b["speedup"] == pytest.approx((4 / 3) / (4 / 5))
    # A task's tau is its own ratio: 3 tokens in 2 calls, 4 in 2.
    assert (a["tau"], b["tau"]) == (1.5, 2.0)


def test_the_clock_chooses_which_time_counts():
    row = summarize({"ar": AR, "spec": SPEC}, "wall", seed=0, compare=True)[1]
    assert row["tokens_per_s"] == 7 / 9 and row["speedup"] == pytest.approx((7 / 9) / (7 / 15))


def test_the_interval_is_seeded_and_holds_the_bootstrap_extremes():
    rows = [summarize({"ar": AR, "spec": SPEC}, "cpu", seed=seed, compare=True)[1] for seed in (0, 0, 1)]
    assert rows[0]["speedup_ci95"] == rows[1]["speedup_ci95"]
    # With two prompts a resample is one of three: twice the first (3x), twice the second (5/3x), or both (2x). Each
    # extreme has probability 1/4, far above 2.5 %, so the interval runs from one to the other.
    assert rows[0]["speedup_ci95"] == pytest.approx([5 / 3, 3.0])
    assert summarize({"ar": AR[:1]}, "cpu", seed=0, compare=True)[0]["speedup_ci95"] is None


def test_simultaneous_intervals_hold_for_all_classes_at_once():
    """Of 150 draws of five classes of 5 to 60 prompts, whose rates are 1 in truth, about 5 % may have any interval that
    misses it: at most 17 of them with a probability of 0.999. One by one, 95 % intervals miss in far more."""
    sizes = [5, 8, 15, 30, 60]
    classes = [np.repeat(np.arange(5), sizes) == number for number in range(5)]
    random, missed = np.random.default_rng(0), {"at once": 0, "one by one": 0}
    for seed in range(150):
        resamples = Resamples(range(sum(sizes)), seed)
        below = random.lognormal(3, 0.5, sum(sizes))
        above = below * random.normal(1, 0.2, sum(sizes))
        rates = [resamples.sums(above * own) / resamples.sums(below * own).clip(1) for own in classes]
        estimates = [float((above * own).sum() / (below * own).sum()) for own in classes]
        found = resamples.simultaneous(estimates, rates, [below * own for own in classes])
        for name, intervals in (("at once", found), ("one by one", [resamples.interval(own) for own in rates])):
            missed[name] += any(not low <= 1 <= high for low, high in intervals)
    assert missed["at once"] <= 17 < 25 < missed["one by one"]
    assert resamples.simultaneous([1.0], rates[:1], [below * classes[0] * (below > below[0])]) == [None]  # four prompts


def test_different_output_is_reported_and_unfair_comparison_is_not_made():
    other = [SPEC[0], {**SPEC[1], "token_ids": [4, 5, 6, 8]}]
    row = summarize({"ar": AR, "spec": other}, "cpu", seed=0, compare=True)[1]
    assert (row["matches_ar"], row["num_differing"]) == (False, 1)
    assert summarize({"ar": AR, "spec": other}, "cpu", seed=0, compare=False)[1]["matches_ar"] is None


def test_shares_that_continue_a_repetition():
    # Prompt 1 2 3 4 5, answer 9 1 2 3 4 5 8 9 1 2 3: in 4, 5 and the last 3 a 4-gram goes on (1234, 2345, 9123).
    made = Generation([9, 1, 2, 3, 4, 5, 8, 9, 1, 2, 3], DecodeTrace(prefill_emitted=11), False)
    rows = [row_of(BenchPrompt("id", [1, 2, 3, 4, 5]), method, 0.0, made, [1.0], [1.0]) for method in ("ar", "spec")]
    for row in summarize({"ar": rows[:1], "spec": rows[1:]}, "cpu", seed=0, compare=True):
        assert (row["copied_prompt"], row["copied_answer"]) == (2 / 11, 1 / 11)


SETTINGS = {"dtype": "float32", "device": "cpu", "num_threads": 1, "repeats": 3}


def results_of(methods: dict[str, list[Row]], *temperatures: float) -> dict:
    rows = [row for t in temperatures or (0.0,) for row in summarize(methods, "cpu", 0, True, t)]
    meta = {"clock": "cpu", "settings": SETTINGS, "step_costs": {}}
    return json.loads(json.dumps({"meta": meta, "methods": rows, "failures": []}))


def test_the_mean_of_tasks_is_named_apart_from_the_pooled_ratio():
    # Task a: 3 tokens in 1 s against 3 s, 2 calls. Task b: 4 tokens in 3 s against 5 s, 2 calls; twice, so that tasks
    # weigh differently. Pooled: 11 tokens in 7 s against 13 s, 6 calls.
    twice = [SPEC[0], SPEC[1], {**SPEC[1], "prompt": 2}]
    row = summarize({"ar": [AR[0], AR[1], {**AR[1], "prompt": 2}], "spec": twice}, "cpu", 0, True)[1]
    assert (row["speedup"], row["tau"]) == (pytest.approx(13 / 7), 11 / 6)
    assert (row["macro_speedup"], row["macro_tau"]) == (pytest.approx((3 + 5 / 3) / 2), (1.5 + 2.0) / 2)
    table = results_tables(results_of({"ar": AR, "spec": SPEC}))[2]
    assert [column.title for column in table.columns] == ["task", "spec", "spec: tau"]
    cells = [row.split(" | ")[:3] for row in markdown(table).splitlines()[4:7]]
    assert cells == [["| a", "3.00x", "1.50 |"], ["| b", "1.67x", "2.00 |"], ["| mean of tasks", "2.33x", "1.75 |"]]
    assert table.note.endswith("Prompts of the tasks: a 1, b 1.")
    several = results_tables(results_of({"ar": AR, **{f"spec:k={k}": SPEC for k in range(1, 6)}}))[2]
    assert [column.title for column in several.columns] == [
        "method", "a", "a: tau", "b", "b: tau", "mean of tasks", "mean of tasks: tau"
    ]  # fmt: skip
    assert "| spec:k=2 | 3.00x | 1.50 | 1.67x | 2.00 | 2.33x | 1.75 |" in markdown(several)


def test_turns_of_one_question_are_resampled_together():
    # Two questions of two turns. Question 1 is 3x in both turns, question 2 is 1x in both: resamples are 1x, 3x or the
    # mix of both, (8/4)/(8/8) = 2x, never something between, and the extremes have probability 1/4 each.
    def turns(per_turn: float, question: int) -> list[Row]:
        one = measured([1, 2], [DecodeStep(1, 0, 1, 1)], per_turn, per_turn, group=question)
        return [{**one, "turn": turn} for turn in (1, 2)]

    ar, fast = [*turns(3.0, 0), *turns(1.0, 1)], [*turns(1.0, 0), *turns(1.0, 1)]
    row = summarize({"ar": ar, "fast": fast}, "cpu", 0, True)[1]
    assert row["speedup"] == pytest.approx(2.0) and row["speedup_ci95"] == pytest.approx([1.0, 3.0])
    assert row["tau_ci95"] == [1.0, 1.0]


def test_rows_come_back_as_they_were_measured(tmp_path):
    prompt = BenchPrompt("id", [1, 2], "a", number=3, turn=2)
    answer = Generation([1, 2, 3], DecodeTrace([DecodeStep(4, 1, 2, 4)], prefill_emitted=1), False)
    row = row_of(prompt, "ar", 0.5, answer, [4.0, 6.0, 5.5], [1.0, 9.0, 2.0])
    assert (row["wall_s"], row["cpu_s"]) == (5.5, 2.0)
    write_rows(tmp_path / PER_PROMPT, [row, row_of(prompt, "ar", 0.5, error="too long")])
    read = read_rows(tmp_path)
    assert of_methods(read, 0.5) == {"ar": [row]} and of_methods(read, 0.0) == {}
    assert failures_of(read) == [
        {"prompt": 3, "id": "id", "task": "a", "turn": 2, "temperature": 0.5, "error": "too long"}
    ]
    assert read[0]["rounds"] == [{"num_drafted": 4, "num_accepted": 1, "num_emitted": 2, "draft_calls": 4}]
    (tmp_path / PER_PROMPT).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="unreadable"):
        read_rows(tmp_path)


def test_a_journal_is_resumed(tmp_path):
    row = json.loads(json.dumps(AR[0]))
    entry = {"prompt": 2, "temperature": 0.0, "rows": [row], "learned": {"online": [{"w": [0.5]}]}}
    first = Journal(tmp_path)
    first.start({"seed": 0}, {"step_costs": {"draft": 0.1}})
    first.add(entry)
    again = Journal(tmp_path)
    again.start({"seed": 0}, {})
    assert (again.entries, again.times) == ([entry], {"step_costs": {"draft": 0.1}})
    with pytest.raises(InputError, match="seed 0 there, 1 here"):
        again.start({"seed": 1}, {})


def row(prompt_tokens: int, turn: int, steps: list[tuple[int, int]], number: int = 0, method: str = "spec") -> Row:
    """An answer of rounds (drafted, accepted), each with a token of the target's own behind those accepted."""
    trace = DecodeTrace([DecodeStep(drafted, kept, kept + 1, drafted) for drafted, kept in steps], prefill_emitted=1)
    prompt = BenchPrompt(str(number), [0] * prompt_tokens, number=number, turn=turn)
    return row_of(prompt, method, 0.0, Generation([0] * trace.num_tokens, trace, False), [1.0], [1.0])


def test_places_contexts_turns_and_kinds_are_counted_by_round():
    # Contexts before the rounds: 250, 253 and 256; then 600 and 601.
    rows = [row(249, 1, [(3, 2), (2, 2), (2, 0)]), row(599, 2, [(3, 0), (1, 1)], 1)]
    rows[0]["kinds"] = ["prose", "code", "prose"]
    found = classes_of_rounds(Rounds.of(rows), Resamples([0, 1], 0), ["context", "turn", "kind"])
    # Five drafts hold a first token, four a second, two a third.
    assert Rounds.of(rows).by_place() == [3 / 5, 2 / 4, 0 / 2] and list(found) == ["context", "turn", "kind"]
    code, prose = found["kind"]
    assert (code["name"], code["rounds"], code["tau"], code["accepted_by_place"]) == ("code", 1, 3.0, [1.0, 1.0])
    assert (prose["name"], prose["rounds"], prose["acceptance_rate"]) == ("prose", 4, (2 + 0 + 0 + 1) / 9)
    assert [(part["from"], part["rounds"], part["tau"]) for part in found["context"]] == [
        (0, 2, (3 + 3) / 2),
        (256, 1, 1.0),
        (512, 2, (1 + 2) / 2),
    ]
    assert [(part["from"], part["rounds"], part["tau"]) for part in found["turn"]] == [(1, 3, 7 / 3), (2, 2, 1.5)]
    assert all(part["tau_ci95"] is None for part in found["context"])
    assert classes_of_rounds(Rounds.of([row(10, 1, [(0, 0)])]), Resamples([0], 0), ["context"]) == {}


def test_tables_show_classes_with_enough_rounds():
    rows = [row(100 + 300 * (number % 2), 1, [(2, number % 3)] * 4, number) for number in range(20)]
    rows.append(row(3000, 1, [(2, 2)], 20))
    baseline = [row(10, 1, [(0, 0)], number, "ar") for number in range(21)]
    methods = summarize({"ar": baseline, "spec": rows}, "cpu", 0, False)
    places, lengths = part_tables(methods, 0.0)
    assert [column.title for column in places.columns] == ["method", "1", "2"]
    assert [column.title for column in lengths.columns if column.title] == ["method", "below 256", "256+"]
    assert lengths.note == "Of rounds, without the prefill. 95 % bootstrap intervals."
    of_few = [row(100 + 300 * (number % 2), 1, [(2, 1)] * 8, number) for number in range(8)]
    few = summarize({"ar": baseline[:8], "spec": of_few}, "cpu", 0, False)
    assert part_tables(few, 0.0)[1].note == "Of rounds, without the prefill."
