"""Runs against each other: ratios and intervals by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.bench.compare import compare_runs, open_bench, run
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import Row, row_of, write_rows
from draftsmith.eval.settings import CompareConfig
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.types import InputError

META: dict[str, Any] = {
    "kind": "bench", "clock": "cpu",
    "settings": {"top_k": 0, "top_p": 1.0, "dtype": "float32", "max_new_tokens": 8, "ignore_eos": False, "turns": "all",
                 "device": "cpu", "num_threads": 1, "loader": "auto", "by": "turn,task"},
    "target": {"config": "aaaa", "tokenizer": "bbbb"},
    "prompts": {"sha256": "c" * 64}, "hardware": {"cpu": "a CPU", "cpu_count": 2},
    "versions": {"torch": "2.8"}, "models": {}, "step_costs": {},
    "heads": {"eagle": {"path": "first", "sha256": "d" * 64}},
}  # fmt: skip


def item(number: int, tokens: list[int], cpu_s: float, rounds: int) -> Row:
    """An answer of one prefill token, and the rest spread over so many rounds."""
    per_round, rest = divmod(len(tokens) - 1, rounds)
    steps = [DecodeStep(5, per_round - 1 + (i < rest), per_round + (i < rest), 5) for i in range(rounds)]
    trace = DecodeTrace(steps, prefill_emitted=1)
    prompt = BenchPrompt(str(number), [1, 2], "task", number=number)
    return row_of(prompt, "ar", 0.0, Generation(tokens, trace, False), [cpu_s], [cpu_s])


def write(directory: Path, methods: dict[str, list[Row]], more: tuple = (), **changes: Any) -> str:
    directory.mkdir()
    rows = [{**row, "method": method} for method, items in methods.items() for row in items]
    write_rows(directory / "prompts.parquet", [*rows, *more])
    (directory / "results.json").write_text(json.dumps({"meta": {**META, **changes}, "methods": []}))
    return str(directory)


ANSWERS = [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 1, 2]]
AR = [item(0, ANSWERS[0], 4.0, 4), item(1, ANSWERS[1], 6.0, 6)]
SLOW = [item(0, ANSWERS[0], 2.0, 2), item(1, ANSWERS[1], 3.0, 3)]  # 2x, 3 and 4 calls
FAST = [item(0, ANSWERS[0], 1.0, 1), item(1, [*ANSWERS[1][:6], 0], 3.0, 3)]  # 4x and 2x, 2 and 4 calls


@pytest.fixture
def runs(tmp_path) -> tuple[str, str]:
    other_head = {"eagle": {"path": "second", "sha256": "e" * 64}}
    return (
        write(tmp_path / "a", {"ar": AR, "eagle:k=5": SLOW, "hf": AR}),
        write(tmp_path / "b", {"ar": AR, "eagle:k=5": FAST, "pld": AR}, heads=other_head),
    )


def test_ratios_differences_and_intervals_by_hand(runs):
    table, _ = compare_runs(*(open_bench(path) for path in runs))
    rows = {row["method"]: row for row in table.rows}
    assert list(rows) == ["ar", "eagle:k=5"]
    row = rows["eagle:k=5"]
    # 12 tokens in 5 s and in 4 s; ar takes 10 s.
    assert row["speed"] == row["gain"] == pytest.approx(5 / 4)
    assert (row["gain_a"], row["gain_b"]) == (pytest.approx(2.0), pytest.approx(2.5))
    assert (row["tau_a"], row["tau_b"]) == (12 / 7, 12 / 6) and row["tau"] == 12 / 6 - 12 / 7
    # Resamples are the first prompt twice (2 s against 1 s, 5 tokens in 3 and in 2 calls), the second twice (equal) or
    # both, and each extreme has probability 1/4.
    assert (row["speed_low"], row["speed_high"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (row["gain_low"], row["gain_high"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (row["tau_low"], row["tau_high"]) == (pytest.approx(0.0), pytest.approx(5 / 2 - 5 / 3))
    assert row["equal"] == "1 of 2" and rows["ar"]["equal"] == "2 of 2" and rows["ar"]["speed"] == 1.0


def test_tau_is_compared_in_the_classes_that_both_runs_have(tmp_path):
    """Six answers of five rounds in A and ten in B, of two languages: 21 tokens in six calls and in eleven."""

    def answers(rounds: int) -> list[Row]:
        rows = [item(number, list(range(21)), 1.0, rounds) for number in range(12)]
        return [{**row, "labels": {"language": "en" if row["prompt"] < 6 else ""}} for row in rows]

    settings = {**META["settings"], "by": "context,language"}
    first, second = (
        write(tmp_path / name, {"ar": answers(20), "spec": answers(rounds)}, settings=settings)
        for name, rounds in (("a", 5), ("b", 10))
    )
    _, table = compare_runs(open_bench(first), open_bench(second))
    assert [(row["class"], row["tau_a"], row["tau_b"]) for row in table.rows[1:]] == [
        ("language=en", 21 / 6, 21 / 11), ("language=none", 21 / 6, 21 / 11)
    ]  # fmt: skip
    assert table.rows[0]["tau_ci"] == "-1.59 to -1.59" and table.rows[0]["class"] == "all prompts"
    run(CompareConfig([first, second]))


def test_classes_have_verdicts_that_hold_for_all_of_them_at_once(tmp_path, capsys):
    """Six answers of 121 tokens in each task. B needs half of A's rounds, all of them, twice as many; of one task it
    needs now more and now fewer, and one has but four answers."""

    def answers(rounds: dict[str, list[int]]) -> list[Row]:
        rows = [(task, each) for task, own in rounds.items() for each in own]
        own = [item(number, list(range(121)), 1.0, each) for number, (_, each) in enumerate(rows)]
        return [{**row, "task": task} for row, (task, _) in zip(own, rows, strict=True)]

    a = {"new": [40, 42, 44, 46, 48, 50], "same": [60] * 6, "mixed": [60] * 6, "few": [60] * 4}
    b = {"new": [20, 21, 22, 23, 24, 25], "same": [60] * 6, "mixed": [40, 80, 50, 70, 45, 75], "few": [30] * 4}

    def compared(name: str, other: dict[str, list[int]]) -> tuple[int, dict[str, Any]]:
        runs = [
            write(tmp_path / f"{name}-{run}", {"ar": answers(a), "spec": answers(own)})
            for run, own in (("a", a), ("b", other))
        ]
        code = main(["eval", "compare", *runs, "--json", "--quiet"])
        return code, json.loads(capsys.readouterr().out)

    code, document = compared("open", b)
    verdicts = {row["class"].removeprefix("task="): row["verdict"] for row in document["tables"][-1]["rows"]}
    assert verdicts.pop("all prompts") == "no verdict"
    assert verdicts == {"new": "better", "same": "not worse", "mixed": "no verdict", "few": "no verdict"}
    assert code == 3 and document["verdict"] == "no verdict"
    line = document["text"][-1]
    assert "spec, tau of B: better on task=new (+2.52, " in line and "; not worse on task=same; no verdict on " in line

    code, document = compared("worse", {**b, "same": [62, 63, 64, 62, 63, 64]})
    assert (code, document["verdict"]) == (1, "worse") and "; worse on task=same (-0.09, " in document["text"][-1]
    code, document = compared("better", {**a, "new": b["new"]})
    assert (code, document["verdict"]) == (3, "no verdict")  # of the four answers


def test_the_only_methods_of_two_runs_are_compared_whatever_their_names(tmp_path):
    first = write(tmp_path / "a", {"ar": AR, "mtp:k=5": SLOW})
    second = write(tmp_path / "b", {"ar": AR, "eagle3:k=5": FAST})
    table, _ = compare_runs(open_bench(first), open_bench(second))
    row = table.rows[1]
    assert row["method"] == "mtp:k=5 (A), eagle3:k=5 (B)" and (row["tau_a"], row["tau_b"]) == (12 / 7, 12 / 6)


def test_tokens_per_second_of_different_machines_are_left_out(tmp_path):
    first = write(tmp_path / "a", {"ar": AR, "spec": SLOW})
    for name, changes in (
        ("cpu", {"hardware": {"cpu": "another CPU", "cpu_count": 2}}),
        ("threads", {"settings": {**META["settings"], "num_threads": 4}}),
    ):
        second = write(tmp_path / name, {"ar": AR, "spec": FAST}, **changes)
        table, _ = compare_runs(open_bench(first), open_bench(second))
        titles = [column.title for column in table.columns]
        assert "tokens/s B/A" not in titles and {"speed-up A", "tau B"} <= set(titles)
        assert table.rows[1]["gain"] == pytest.approx(5 / 4) and "speed" not in table.rows[1]


def test_prompts_that_one_run_failed_on_are_left_out_of_both(tmp_path):
    first = write(tmp_path / "a", {"ar": AR, "spec": SLOW})
    prompt = BenchPrompt("1", [1, 2], "task", number=1)
    failed = tuple(row_of(prompt, method, 0.0, error="too long") for method in ("ar", "spec"))
    second = write(tmp_path / "b", {"ar": AR[:1], "spec": FAST[:1]}, failed)
    table, _ = compare_runs(open_bench(first), open_bench(second))
    assert table.rows[1]["speed"] == 2.0 and table.rows[1]["speed_ci"] == "" and table.rows[1]["equal"] == "1 of 1"


def test_turns_that_follow_other_answers_are_left_out_and_counted(tmp_path):
    """At T > 0 a second turn's prompt holds the run's own first answer, which another seed changes."""

    def turns(rows: list[Row], answered: int) -> list[Row]:
        second = [{**row, "turn": 2, "prompt_ids": [1, word]} for row, word in zip(rows, (answered, 9), strict=True)]
        return [*rows, *second]

    first = write(tmp_path / "a", {"ar": turns(AR, 7), "spec": turns(SLOW, 7)})
    second = write(tmp_path / "b", {"ar": turns(AR, 8), "spec": turns(FAST, 8)})
    table, _ = compare_runs(open_bench(first), open_bench(second))
    rows = {row["method"]: row for row in table.rows}
    assert rows["ar"]["equal"] == "3 of 3" and rows["spec"]["equal"] == "1 of 3"
    assert table.note.startswith("3 prompts") and table.note.endswith("in A than in B: 1.")
    # The second prompt counts twice: 2 + 2 * 3 s and 1 + 2 * 3 s.
    assert rows["spec"]["speed"] == pytest.approx(8 / 7)


def test_runs_of_different_work_are_refused_in_one_line_that_lists_all(tmp_path, capsys):
    first = write(tmp_path / "a", {"ar": AR})
    other = {
        "target": {"config": "ffff", "tokenizer": "9999"},
        "settings": {**META["settings"], "top_k": 5, "dtype": "bfloat16"},
        "prompts": {"sha256": "0" * 64},
    }
    second = write(tmp_path / "b", {"ar": AR}, **other)
    assert main(["eval", "compare", first, second]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in ("dtype float32 and bfloat16", "prompts.sha256 cccc", "top_k 0 and 5",
                 "target.config aaaa and ffff", "target.tokenizer bbbb and 9999"):  # fmt: skip
        assert part in err


def test_results_of_another_command_are_refused(tmp_path):
    with pytest.raises(InputError, match="results of kind schedule"):
        open_bench(write(tmp_path / "study", {"ar": AR}, kind="schedule"))
