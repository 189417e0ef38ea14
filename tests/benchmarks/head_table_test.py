"""EAGLE-2's table 1: what it asks the trainings and the bench for, and how it pools seeds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from draftsmith.benchmarks import head_table, recipes
from draftsmith.benchmarks.head_table import HEADS, HeadTableConfig, pooled
from draftsmith.benchmarks.recipes import RECIPES
from draftsmith.data.store.manifest import resolved
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import PER_PROMPT, row_of, write_rows
from draftsmith.eval.meta import RESULTS
from draftsmith.launch.commands import configure
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.pretrained.files import make_directory, write_json


def answered(method: str, prompt: int, tokens: int, rounds: int, seconds: float, temperature: float = 0.0) -> dict:
    steps = [DecodeStep(5, 0, 1, 5)] * (rounds - 1) + [DecodeStep(5, tokens - rounds, tokens - rounds + 1, 5)]
    made = Generation([7] * tokens, DecodeTrace(steps, 0, 0), True)
    asked = BenchPrompt(str(prompt), [1], number=prompt)
    return row_of(asked, prompt, method, temperature, made, [seconds], [seconds])


def test_seeds_are_pooled_as_sums_and_a_prompt_is_drawn_with_all_of_its_answers():
    seeds = [
        {
            "ar": [answered("ar", prompt, 8, 8, 2.0) for prompt in range(2)],
            "eagle-tree": [answered("eagle-tree", 0, 8, rounds, 1.0), answered("eagle-tree", 1, 8, 2 * rounds, 1.0)],
        }
        for rounds in (2, 4)
    ]
    plain, ours = pooled(seeds)
    assert plain["tau"] == plain["speedup"] == 1.0 and plain["taus"] == [1.0, 1.0]
    assert ours["taus"] == [16 / 6, 16 / 12] and ours["tau"] == pytest.approx(32 / 18)
    assert ours["speedup"] == 2.0 and ours["matches_ar"] is True
    # All resamples are of prompts, never of a seed alone: prompt 0 gives 16 tokens in 6 rounds, prompt 1 in 12.
    assert ours["tau_ci95"] == pytest.approx([16 / 12, 16 / 6])


def test_it_trains_every_kind_and_measures_all_methods_with_the_heads_of_a_seed(tmp_path, monkeypatch):
    trained, benched = [], []

    def bench(*words: str) -> float:
        assert words[:2] == ("-m", "draftsmith")
        _, config = configure(" ".join(words[2:4]), words[4:])
        benched.append(config)
        make_directory(config.output)
        methods = [named.label for named in parse_methods(config.methods)]
        temperatures = [params.temperature for params in config.modes]
        rows = [answered(m, p, 6, 6 if m == "ar" else 3, 1.0, t) for t in temperatures for m in methods for p in (0, 1)]
        write_rows(config.output / PER_PROMPT, rows)
        write_json(config.output / RESULTS, {"meta": {"settings": resolved(config)}})
        return 1.0

    monkeypatch.setattr(recipes, "run", trained.append)
    monkeypatch.setattr(head_table, "python", bench)
    config = HeadTableConfig(tmp_path, seeds=2)
    found = json.loads(head_table.run(config).read_text())
    assert trained == [config.training] and set(trained[0].names) == set(HEADS) and trained[0].seeds == 2
    assert {RECIPES[name].kind for name in HEADS} == {"eagle", "eagle3", "medusa", "hydra"}
    heads = [[str(Path(path)) for path in run.draft] for run in benched]
    assert heads == [[str(tmp_path / f"heads/runs/{name}-{seed}/last") for name in HEADS] for seed in (0, 1)]
    assert [row["tau"] for row in found["rows"]["T=1"]] == [1.0] + [2.0] * 8
    assert [row["matches_ar"] for row in found["rows"]["greedy"]] == [True] * 9
    table = (tmp_path / "table1.md").read_text()
    assert "**Greedy**" in table and "| eagle-tree | 2.00 |" in table and "| 2.00 2.00 | 1.00x |" in table
    head_table.run(config)
    assert len(benched) == 2  # what is measured stays
    fewer = dataclasses.replace(config, methods="pld,eagle-tree")
    rows = json.loads(head_table.run(fewer).read_text())["rows"]["greedy"]
    assert len(benched) == 4 and [row["method"] for row in rows] == [
        "ar",
        "pld",
        "eagle-tree",
    ]  # and of others it is not
