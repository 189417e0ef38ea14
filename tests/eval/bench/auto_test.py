"""Costs that a run measured for `auto` are saved with its results: with them and the seed every round is the same."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_world import draft_options

from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench import measuring as asking
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.compare import notes_of, open_bench
from draftsmith.eval.bench.results import read_rows
from draftsmith.eval.bench.tables import caption

GIVEN = "online:c=0.1:max=4,spec:k=2"
AUTO = "online:max=4,eagle2:nodes=auto:depth=auto:topk=2"


def config_of(models, output, **changes) -> BenchConfig:
    return BenchConfig(
        **{
            **draft_options({flag: models[flag] for flag in ("target", "draft", "eagle", "prompts")}),
            **{"methods": AUTO, "repeats": 1, "max_new_tokens": 12, "temperatures": "0,1", "output": output},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def first(models, tmp_path_factory) -> BenchConfig:
    config = config_of(models, tmp_path_factory.mktemp("first"))
    assert bench.run(config) == 0
    return config


def interrupt_after(monkeypatch, calls: int) -> None:
    """The call number `calls` + 1 to `measure` raises what Ctrl-C raises."""
    measure, seen = asking.measure_group, []

    def measured(*args):
        if len(seen) == calls:
            raise KeyboardInterrupt
        seen.append(args)
        return measure(*args)

    monkeypatch.setattr(asking, "measure_group", measured)


def rounds(config: BenchConfig) -> list[tuple]:
    """Of every row what no clock said: its tokens, and its rounds one by one."""
    return [
        (row["method"], row["temperature"], row["prompt"], row["token_ids"], row["rounds"])
        for row in read_rows(config.output)
    ]


def meta(config: BenchConfig) -> dict:
    return json.loads((config.output / "results.json").read_text())["meta"]


def test_what_auto_came_to_is_in_the_results(first):
    kept = meta(first)
    assert set(kept["step_costs"]) == {"draft"} and kept["step_costs"]["draft"] > 0
    curve = kept["tree_times"]["target, by rows"]
    assert all(seconds > 0 for seconds in curve.values()) and len(kept["tree_times"]) == 2
    results = json.loads((first.output / "results.json").read_text())
    assert f" c by draft: {kept['step_costs']['draft']:.3g}." in caption(results)


def test_a_run_by_anothers_costs_drafts_the_same_in_every_round(first, tmp_path):
    again = dataclasses.replace(first, output=tmp_path, costs=first.output)
    assert bench.run(again) == 0
    assert rounds(again) == rounds(first)
    assert {kind: meta(again)[kind] for kind in ("step_costs", "tree_times")} == {
        kind: meta(first)[kind] for kind in ("step_costs", "tree_times")
    }
    assert not any("measured other costs" in note for note in notes_of(*map(open_bench, (first.output, tmp_path))))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_with_c_given_the_seed_fixes_every_round(models, tmp_path, batch_size):
    configs = [
        config_of(models, tmp_path / name, methods=GIVEN, batch_size=batch_size, draft=models["draft"])
        for name in ("a", "b")
    ]
    assert [bench.run(config) for config in configs] == [0, 0]
    assert rounds(configs[0]) == rounds(configs[1]) and meta(configs[0])["step_costs"] == {}


def test_a_broken_run_goes_on_with_its_costs_and_what_was_learned(first, tmp_path, monkeypatch):
    broken = dataclasses.replace(first, output=tmp_path, costs=first.output)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            bench.run(broken)
    with monkeypatch.context() as patch:  # what goes on asks no clock, and no other run
        patch.setattr("draftsmith.eval.costs.measure_step_cost", None)
        patch.setattr("draftsmith.eval.costs.time_target_trees", None)
        patch.setattr("draftsmith.eval.bench.command.load_times", None)
        assert bench.run(broken) == 0
    assert rounds(broken) == rounds(first)
