"""Interrupted runs: what is measured, and measured for `auto`, is kept; what is left is done, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import signal
import time

import pytest
from forked import commanded
from worlds import draft_options

from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench import measuring as asking
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.measuring import Journal
from draftsmith.eval.bench.results import read_rows
from draftsmith.eval.bench.tables import caption
from draftsmith.modules.types import InputError

NUM_PROMPTS = 24
GIVEN = "online:c=0.1:max=4,spec:k=2"
AUTO = "online:max=4,eagle-tree:nodes=6:depth=2:topk=2"
CLOCKS = {"wall_s", "cpu_s", "wall_s_runs", "cpu_s_runs"}


def config_of(models, output, **changes) -> BenchConfig:
    return BenchConfig(
        **{
            **draft_options({flag: models[flag] for flag in ("target", "draft", "eagle", "data")}),
            **{"methods": AUTO, "repeats": 1, "max_new_tokens": 12, "temperature": "0,1", "output": output},
            **changes,
        }
    )


def rounds(config: BenchConfig) -> list[dict]:
    """All of the rows, with their rounds, but what a clock said."""
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in read_rows(config.output)]


def interrupt_after(monkeypatch, calls: int) -> list[int]:
    """Prompt number `calls` + 1 raises what Ctrl-C raises; the list receives the prompts that were measured."""
    seen: list[int] = []
    run = asking.PromptRunner.run

    def measured(self, prompt, number, temperature):
        if len(seen) == calls:
            raise KeyboardInterrupt
        seen.append(number)
        return run(self, prompt, number, temperature)

    monkeypatch.setattr(asking.PromptRunner, "run", measured)
    return seen


def test_a_killed_process_is_continued(models, tmp_path):
    """SIGKILL in the middle: no handler runs, nothing is written behind it."""
    many = tmp_path / "many.jsonl"
    many.write_text(
        "".join(
            json.dumps({"id": f"{i}", "prompt": f"Rename a{i} to b", "half": i % 2}) + "\n" for i in range(NUM_PROMPTS)
        )
    )
    changes = {"data": str(many), "methods": "spec:k=3", "by": "half", "temperature": "0"}
    broken = config_of(models, tmp_path / "broken", **changes)
    words = [f"--{name}={getattr(broken, name)}" for name in ("target", "data", "methods", "repeats", "by",
                                                             "max_new_tokens", "output")]  # fmt: skip
    words += [f"--head={path}" for path in broken.head]
    process = commanded(["eval", "bench", *words], tmp_path / "log")
    journal = broken.output / "journal.jsonl"
    while process.is_alive() and not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not (broken.output / "results.json").exists()
    kept = journal.read_bytes()
    kept = [json.loads(line)["rows"] for line in kept[: kept.rfind(b"\n")].splitlines()[1:]]
    assert 3 <= len(kept) < NUM_PROMPTS
    assert bench.run(broken) == 0
    rows = {(row["method"], row["prompt"]): row for row in read_rows(broken.output)}
    assert set(rows) == {(method, number) for method in ("ar", "spec:k=3") for number in range(NUM_PROMPTS)}
    for row in (row for before in kept for row in before):
        found = rows[row["method"], row["prompt"]]
        # Kinds of tokens are added once all is measured.
        assert {**row, "kinds": found["kinds"]} == found
    results = json.loads((broken.output / "results.json").read_text())
    assert all(row["prompts"] == NUM_PROMPTS and row["matches_ar"] for row in results["methods"])
    assert [part["prompts"] for row in results["methods"] for part in row["by"]["half"]] == [NUM_PROMPTS // 2] * 4


def test_a_damaged_journal_is_told(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"settings": {}, "auto": {}}\nnonsense\n')
    with pytest.raises(InputError, match="damaged in line 2"):
        Journal(tmp_path)


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> tuple[BenchConfig, BenchConfig]:
    """A run by costs that no clock took, and the same run, interrupted in the middle of a write."""
    config = config_of(models, tmp_path_factory.mktemp("first"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.eval.costs.measure_step_cost", lambda *_: 0.1)
        assert bench.run(config) == 0
        broken = dataclasses.replace(config, output=tmp_path_factory.mktemp("broken"))
        interrupt_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            bench.run(broken)
    with (broken.output / "journal.jsonl").open("a") as file:
        file.write('{"prompt": 2, "temperature": 1.0, "rows": [{"met')
    return config, broken


def test_what_auto_came_to_is_in_the_results(runs):
    results = json.loads((runs[0].output / "results.json").read_text())
    assert results["meta"]["step_costs"] == {"draft": 0.1} and " c by draft: 0.1." in caption(results)


def test_with_c_given_the_seed_fixes_every_round(models, tmp_path):
    configs = [config_of(models, tmp_path / name, methods=GIVEN) for name in ("a", "b")]
    assert [bench.run(config) for config in configs] == [0, 0]
    assert rounds(configs[0]) == rounds(configs[1])
    other = dataclasses.replace(configs[0], seed=1, output=tmp_path / "other")
    assert bench.run(other) == 0 and rounds(other) != rounds(configs[0])
    assert json.loads((tmp_path / "a" / "results.json").read_text())["meta"]["step_costs"] == {}


def test_a_broken_run_goes_on_with_its_costs_and_what_was_learned(runs, monkeypatch, capsys):
    whole, broken = runs
    assert not (broken.output / "results.json").exists()
    # A resumed run asks no clock for costs.
    monkeypatch.setattr("draftsmith.eval.costs.measure_step_cost", None)
    seen = interrupt_after(monkeypatch, 100)
    assert bench.run(broken) == 0
    assert "5 of 12 prompts are measured" in capsys.readouterr().err and len(seen) == 12 - 5
    assert rounds(broken) == rounds(whole) and not (broken.output / "journal.jsonl").exists()
