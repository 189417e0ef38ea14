"""Acceptance by place, context and turn, against numbers worked out by hand."""

from __future__ import annotations

import csv

import pytest

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import Row, acceptance, row_of, summarize, write_numbers
from draftsmith.eval.bench.tables import acceptance_tables
from draftsmith.eval.bootstrap import Resamples
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace


def row(prompt_tokens: int, turn: int, steps: list[tuple[int, int]], number: int = 0, method: str = "spec") -> Row:
    """An answer of rounds (drafted, accepted), each with a token of the target's own behind those accepted."""
    trace = DecodeTrace([DecodeStep(drafted, kept, kept + 1, drafted) for drafted, kept in steps], prefill_emitted=1)
    prompt = BenchPrompt(str(number), [0] * prompt_tokens, number=number, turn=turn)
    return row_of(prompt, number, method, 0.0, Generation([0] * trace.num_tokens, trace, False), [1.0], [1.0])


def test_places_contexts_and_turns_are_counted_by_round():
    # Contexts before the rounds: 250, 253 and 256; then 600 and 601.
    rows = [row(249, 1, [(3, 2), (2, 2), (2, 0)]), row(599, 2, [(3, 0), (1, 1)], 1)]
    found = acceptance(rows, Resamples([0, 1], 0))
    # Five drafts hold a first token, four a second, two a third.
    assert found["accepted_by_place"] == [3 / 5, 2 / 4, 0 / 2]
    assert [(part["from"], part["rounds"], part["tau"]) for part in found["by_context"]] == [
        (0, 2, (3 + 3) / 2),
        (256, 1, 1.0),
        (512, 2, (1 + 2) / 2),
    ]
    assert [(part["turn"], part["rounds"], part["tau"]) for part in found["by_turn"]] == [(1, 3, 7 / 3), (2, 2, 1.5)]
    assert all(part["tau_ci95"] is None for part in found["by_context"])
    assert acceptance([row(10, 1, [(0, 0)])], Resamples([0], 0)) == {}


def test_tables_show_classes_with_enough_rounds_and_csv_has_all(tmp_path):
    rows = [row(100 + 300 * (number % 2), 1, [(2, number % 3)] * 4, number) for number in range(20)]
    rows.append(row(3000, 1, [(2, 2)], 20))
    baseline = [row(10, 1, [(0, 0)], number, "ar") for number in range(21)]
    methods = summarize({"ar": baseline, "spec": rows}, "cpu", 0, False)
    places, lengths = acceptance_tables(methods, "", "greedy")
    assert [column.title for column in places.columns] == ["method", "1", "2"]
    assert [column.title for column in lengths.columns if column.title] == ["method", "below 256", "256+"]
    write_numbers(tmp_path / "results.csv", methods)
    with (tmp_path / "results.csv").open() as file:
        lines = {(line["method"], line["part"]): line for line in csv.DictReader(file)}
    assert {part for method, part in lines if method == "spec"} == {
        "all", "context from 0", "context from 256", "context from 2048", "turn 1",
    }  # fmt: skip
    whole, long = lines["spec", "all"], lines["spec", "context from 256"]
    assert float(whole["tau_low"]) < methods[1]["tau"] == float(whole["tau"]) < float(whole["tau_high"])
    assert float(whole["acceptance_rate"]) == pytest.approx(methods[1]["num_accepted"] / methods[1]["num_draft_tokens"])
    assert float(long["tau_low"]) <= float(long["tau"]) <= float(long["tau_high"]) and int(long["rounds"]) == 40
    assert lines["ar", "all"]["acceptance_rate"] == ""
