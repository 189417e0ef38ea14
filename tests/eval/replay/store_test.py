"""Rollouts come back from disk as they were, and recording goes on where it stopped."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hand_rollouts import of_answer

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.rollouts import (
    ChainRollouts,
    TargetAnswer,
    joined,
    read_answer,
    recorded,
    write_answer,
)
from draftsmith.modules.types import InputError


def chains(number: int, rounds: int) -> ChainRollouts:
    rng = np.random.default_rng(number)
    answer = TargetAnswer(f"row-{number}", "rename", 7, list(range(rounds + 1)), number % 2 == 0, 40)

    def floats() -> np.ndarray:
        values = rng.normal(size=(rounds, 3))
        values[rng.random((rounds, 3)) < 0.2] = np.nan
        return values

    return ChainRollouts(
        [answer], np.zeros(rounds, np.int64), np.arange(1, rounds + 1), rng.integers(-1, 9, (rounds, 3)),
        rng.integers(0, 3, rounds), floats(), floats(), floats(), floats(), {"a/b": floats(), "c": floats()},
        rng.integers(0, 3, rounds),
    )  # fmt: skip


def assert_same(first, second) -> None:
    assert type(first) is type(second)
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name == "heads":
            assert list(a) == list(b)
            a, b = np.array(list(a.values())), np.array(list(b.values()))
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_a_round_trip_changes_nothing(tmp_path):
    whole = joined([chains(0, 5), chains(1, 0), chains(2, 2)])
    assert whole.answer.tolist() == [0, 0, 0, 0, 0, 2, 2]
    for number in range(3):
        write_answer(of_answer(whole, number), tmp_path / str(number))
    assert_same(joined([read_answer(tmp_path / str(number)) for number in range(3)]), whole)


def test_recording_goes_on_with_the_answers_that_are_missing(tmp_path):
    prompts, asked = [BenchPrompt(f"row-{n}", [1]) for n in range(3)], []

    def record(prompt: BenchPrompt, number: int) -> ChainRollouts:
        asked.append(prompt.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return chains(number, 4)

    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, prompts, {"depth": 3}, record)
    found = recorded(tmp_path, prompts, {"depth": 3}, record)
    assert asked == ["row-0", "row-1", "row-1", "row-2"]
    assert_same(found, joined([chains(n, 4) for n in range(3)]))


def test_rollouts_of_other_settings_are_not_taken(tmp_path):
    prompts = [BenchPrompt("row-0", [1])]
    recorded(tmp_path, prompts, {"depth": 3}, lambda prompt, number: chains(0, 4))
    with pytest.raises(InputError, match="depth"):
        recorded(tmp_path, prompts, {"depth": 4}, lambda prompt, number: chains(0, 4))
