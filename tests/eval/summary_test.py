"""Rows of results.json, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from draftsmith.eval.measure import BenchPrompt, Measured, medians_of
from draftsmith.eval.summary import distinct_4grams, summarise
from draftsmith.eval.tables import markdown_table, results_table, task_table
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace


def measured(
    tokens: list[int], steps: list[DecodeStep], cpu_s: float, wall_s: float, task: str = "", group: int = 0
) -> Measured:
    trace = DecodeTrace(steps, prefill_emitted=1)
    return Measured(BenchPrompt("id", [1, 2], task), group, tokens, trace, False, wall_s=wall_s, cpu_s=cpu_s)


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
    row = summarise({"ar": AR, "spec": SPEC}, "cpu", seed=0, compare=True)[1]
    assert (row["method"], row["prompts"], row["tokens"]) == ("spec", 2, 7)
    assert (row["wall_s"], row["cpu_s"]) == (9.0, 4.0)
    assert row["tokens_per_s"] == 7 / 4
    assert row["speedup"] == row["speedup_cpu"] == (7 / 4) / (7 / 8)
    assert row["speedup_wall"] == pytest.approx((7 / 9) / (7 / 15))
    assert (row["num_target_calls"], row["num_draft_tokens"], row["num_accepted"]) == (4, 6, 3)
    assert row["num_discarded"] == 6 + 4 - 7
    assert row["tau"] == 7 / 4 and row["discard_rate"] == 3 / 7 and row["verification_rate"] == 4 / 7
    assert row["matches_ar"] is True and row["num_differing"] == 0
    assert set(row["by_task"]) == {"a", "b"} and row["by_task"]["b"]["speedup"] == pytest.approx((4 / 3) / (4 / 5))
    # A task's tau is its own ratio: 3 tokens in 2 calls, 4 in 2.
    assert (row["by_task"]["a"]["tau"], row["by_task"]["b"]["tau"]) == (1.5, 2.0)


def test_the_clock_chooses_which_time_counts():
    row = summarise({"ar": AR, "spec": SPEC}, "wall", seed=0, compare=True)[1]
    assert row["tokens_per_s"] == 7 / 9 and row["speedup"] == row["speedup_wall"]


def test_the_interval_is_seeded_and_holds_the_bootstrap_extremes():
    rows = [summarise({"ar": AR, "spec": SPEC}, "cpu", seed=seed, compare=True)[1] for seed in (0, 0, 1)]
    assert rows[0]["speedup_ci95"] == rows[1]["speedup_ci95"]
    # With two prompts a resample is one of three: twice the first (3x), twice the second (5/3x), or both (2x). Each
    # extreme has probability 1/4, far above 2.5 %, so the interval runs from one to the other.
    assert rows[0]["speedup_ci95"] == pytest.approx([5 / 3, 3.0])
    assert summarise({"ar": AR[:1]}, "cpu", seed=0, compare=True)[0]["speedup_ci95"] is None


def test_what_was_timed_together_is_resampled_together():
    # Groups of two prompts, each with an equal share of its group's seconds: whole groups give 3x and 5/3x, as above
    # with their tokens halved, while resampling prompts would mix a share with its mate's.
    def halves(items: list[Measured]) -> list[Measured]:
        return [dataclasses.replace(i, wall_s=i.wall_s / 2, cpu_s=i.cpu_s / 2, tokens=t)
                for i in items for t in (i.tokens[:1], i.tokens[1:])]  # fmt: skip

    row = summarise({"ar": halves(AR), "spec": halves(SPEC)}, "cpu", seed=0, compare=True)[1]
    assert row["speedup_ci95"] == pytest.approx([5 / 3, 3.0])
    one_group = [dataclasses.replace(item, group=0) for item in AR]
    assert summarise({"ar": one_group}, "cpu", seed=0, compare=True)[0]["speedup_ci95"] is None


def test_a_group_of_several_tasks_has_no_row_by_task():
    mixed = [dataclasses.replace(item, group=0) for item in AR]
    assert "by_task" not in summarise({"ar": mixed}, "cpu", seed=0, compare=True)[0]


def test_different_output_is_reported_and_unfair_comparison_is_not_made():
    other = [SPEC[0], dataclasses.replace(SPEC[1], tokens=[4, 5, 6, 8])]
    row = summarise({"ar": AR, "spec": other}, "cpu", seed=0, compare=True)[1]
    assert (row["matches_ar"], row["num_differing"]) == (False, 1)
    assert summarise({"ar": AR, "spec": other}, "cpu", seed=0, compare=False)[1]["matches_ar"] is None


def test_distinct_4grams_of_a_loop():
    # 1 2 1 2 1 2 1 has four 4-grams, 1212 and 2121 twice each; the other answer has one.
    loop, other = (measured(tokens, [], 1, 1) for tokens in ([1, 2, 1, 2, 1, 2, 1], [5, 6, 7, 8]))
    assert distinct_4grams([loop]) == 2 / 4
    assert distinct_4grams([loop, other]) == 3 / 5
    assert distinct_4grams([measured([1, 2], [], 1, 1)]) is None


def test_medians_over_repeats_are_taken_for_each_clock():
    generation = Generation([1], DecodeTrace(prefill_emitted=1), True)
    runs = [([generation], 3.0, 1.0), ([generation], 1.0, 9.0), ([generation], 2.0, 2.0)]
    (item,) = medians_of(0, [BenchPrompt("id", [1])], runs)
    assert (item.wall_s, item.cpu_s) == (2.0, 2.0)


def test_tables_fit_in_100_columns_and_say_the_same():
    long_name = "specdec++:h=0.7:min=2:max=20:calibrated=on"
    rows = summarise({"ar": AR, long_name: SPEC, "spec:k=5": SPEC}, "cpu", seed=0, compare=True)
    settings = {"temperature": 0.0, "dtype": "float32", "device": "cpu", "num_threads": 1, "repeats": 3}
    results = json.loads(json.dumps({"meta": {"clock": "cpu", "settings": settings}, "methods": rows}))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(results))
    console.print(task_table(results))
    shown = console.export_text()
    assert "…" not in shown and all(len(line) <= 100 for line in shown.splitlines())
    markdown = markdown_table(results)
    assert f"| {long_name} | 1.8 | 2.00x | 1.67-3.00 | 1.75 | 4 | 43% | yes |" in markdown
    for part in ("2.00x", "1.67-3.00", "1.75", "43%", "2 prompts, 7 tokens", "greedy", "CPU time"):
        assert part in shown and (part in markdown)


def test_many_methods_go_into_rows_of_the_table_by_task():
    methods = {f"spec:k={k}": SPEC for k in range(1, 21)}
    rows = summarise({"ar": AR, **methods}, "cpu", seed=0, compare=True)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(task_table({"methods": rows}))
    lines = console.export_text().splitlines()
    own = rows[1]["by_task"].values()
    for method in methods:
        (line,) = (line for line in lines if line.split()[:1] == [method])
        assert line.split()[1:] == [f"{part['speedup']:.2f}x" for part in own]
