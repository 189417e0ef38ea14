"""Costs that a run measured for `auto` are saved with its results and its journal: by them every round is the same."""

from __future__ import annotations

import dataclasses
import json

import pytest
from worlds import draft_options

from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench import measuring as asking
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.results import read_rows
from draftsmith.eval.bench.tables import caption

GIVEN = "online:c=0.1:max=4,spec:k=2"
AUTO = "online:max=4,eagle-tree:nodes=auto:depth=auto:topk=2"


def config_of(models, output, **changes) -> BenchConfig:
    return BenchConfig(
        **{
            **draft_options({flag: models[flag] for flag in ("target", "draft", "eagle", "data")}),
            **{"methods": AUTO, "repeats": 1, "max_new_tokens": 12, "temperature": "0,1", "output": output},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> tuple[BenchConfig, BenchConfig]:
    """A run by costs that no clock took, and the same run, interrupted."""
    config = config_of(models, tmp_path_factory.mktemp("first"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.eval.costs.measure_step_cost", lambda *_: 0.1)
        patch.setattr("draftsmith.eval.costs.time_draft_steps", lambda *_: {"first": 0.002, "step": 0.001})
        patch.setattr("draftsmith.eval.costs.time_target_trees", lambda *_: {1: 0.01, 64: 0.03})
        assert bench.run(config) == 0
        broken = dataclasses.replace(config, output=tmp_path_factory.mktemp("broken"))
        interrupt_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            bench.run(broken)
    return config, broken


def interrupt_after(monkeypatch, calls: int) -> list[int]:
    """Group number `calls` + 1 raises what Ctrl-C raises; the list receives the groups that were measured."""
    seen: list[int] = []
    run = asking.PromptRunner.run

    def measured(self, group, number, temperature):
        if len(seen) == calls:
            raise KeyboardInterrupt
        seen.append(number)
        return run(self, group, number, temperature)

    monkeypatch.setattr(asking.PromptRunner, "run", measured)
    return seen


def rounds(config: BenchConfig) -> list[tuple]:
    """Of every row what no clock said: its tokens, and its rounds one by one."""
    return [
        (row["method"], row["temperature"], row["prompt"], row["token_ids"], row["rounds"])
        for row in read_rows(config.output)
    ]


def test_what_auto_came_to_is_in_the_results(runs):
    results = json.loads((runs[0].output / "results.json").read_text())
    assert results["meta"]["step_costs"] == {"draft": 0.1} and " c by draft: 0.1." in caption(results)
    assert results["meta"]["tree_times"]["target, by rows"] == {"1": 0.01, "64": 0.03}


def test_with_c_given_the_seed_fixes_every_round(models, tmp_path):
    configs = [config_of(models, tmp_path / name, methods=GIVEN) for name in ("a", "b")]
    assert [bench.run(config) for config in configs] == [0, 0]
    assert rounds(configs[0]) == rounds(configs[1])
    assert json.loads((tmp_path / "a" / "results.json").read_text())["meta"]["step_costs"] == {}


def test_a_broken_run_goes_on_with_its_costs_and_what_was_learned(runs, monkeypatch):
    whole, broken = runs
    # A resumed run asks no clock for costs.
    monkeypatch.setattr("draftsmith.eval.costs.measure_step_cost", None)
    monkeypatch.setattr("draftsmith.eval.costs.time_target_trees", None)
    assert bench.run(broken) == 0
    assert rounds(broken) == rounds(whole)
