"""The latency benchmark's clocks against a clock that the test winds, its models against transformers, and a run."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.benchmarks.latency import LatencyConfig, Pair, run, timed_copy
from draftsmith.benchmarks.synthetic import random_pair
from draftsmith.eval.clock import Stopwatch, interleaved
from draftsmith.launch.cli import main_of


class Wound:
    """A clock that moves only when something says it took time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


def test_a_call_inside_a_timed_call_counts_once_and_other_time_not_at_all():
    clock = Wound()
    watch = Stopwatch(clock)
    inner = watch.timed(lambda: clock.take(1.0))

    def both() -> None:
        clock.take(2.0)
        inner()

    watch.timed(both)()
    clock.take(10.0)
    inner()
    both()  # of this only what is inside
    assert watch.take() == 3.0 + 1.0 + 1.0 and watch.seconds == 0.0


def test_a_timed_copy_of_a_model_computes_the_same_and_leaves_the_model_alone():
    lm = random_pair("tiny", torch.float32, "cpu")[0].lean(True)
    clock = Wound()
    watch = Stopwatch(clock)
    timed, before = timed_copy(lm, watch), dict(vars(lm))
    scores = [model.session(1, 8).extend([[1, 40, 7]], logits_to_keep=3).logits for model in (lm, timed)]
    assert torch.equal(*scores) and vars(lm) == before


def test_interleaved_runs_take_turns_at_being_first():
    clock, order = Wound(), []

    def call(name: str, seconds: float):
        def run() -> None:
            order.append(name)
            clock.take(seconds)

        return run

    seconds = interleaved({"a": call("a", 1.0), "b": call("b", 3.0)}, 2, clock)
    assert order == ["a", "b", "a", "b", "b", "a"]  # the first of each is not counted
    assert seconds == {"a": [1.0, 1.0], "b": [3.0, 3.0]}


@pytest.mark.parametrize("number", [0, 1])
def test_the_random_models_are_the_same_in_both_engines(number):
    weights = random_pair("tiny", torch.float32, "cpu")[number]
    lean, hf = weights.lean(False), weights.transformers()
    ids = torch.tensor([[1, 40, 7, 63, 0]])
    torch.testing.assert_close(lean.lm_head(lean.features(ids)), hf(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_benchmark_measures_every_number_it_names(tmp_path):
    pair = Pair.of(LatencyConfig(output=tmp_path, models="tiny", new_tokens=24))
    assert pair.decode("ar") == pair.decode("spec") == pair.generate(False) == pair.generate(True)
    words = ["--models", "tiny", "--repeats", "1", "--new-tokens", "24", "--output", str(tmp_path)]
    assert main_of(LatencyConfig, run, words) == 0
    rows = {row["what"]: row["value"] for row in json.loads((tmp_path / "latency.json").read_text())["rows"]}
    assert len(rows) == 5 and all(value > 0 for value in rows.values())
    assert rows["spec:k=5: of a round, beyond its forwards"] < 100
    assert (tmp_path / "latency.md").read_text().count("\n") == len(rows) + 2
