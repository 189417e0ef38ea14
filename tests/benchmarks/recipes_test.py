"""Recipes: what a budget buys, which runs count as done, how seeds are pooled and compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from draftsmith.benchmarks import recipes
from draftsmith.benchmarks.recipes import (
    RECIPES,
    RecipesConfig,
    acceptance,
    compared,
    trained,
)
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import PER_PROMPT, row_of, write_rows
from draftsmith.launch.commands import configure
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.pretrained.files import make_directory


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_one_that_training_takes(name):
    words = RecipesConfig(Path("out")).training(name)
    _, config = configure(f"train {RECIPES[name].kind}", [*words, "--output", "x"])
    assert {key: getattr(config, key) for key in RECIPES[name].settings} == RECIPES[name].settings
    if RECIPES[name].kind == "eagle3":
        assert config.ttt_steps == RECIPES[name].settings.get("ttt_steps", 3)


def test_steps_are_measured_once_for_recipes_of_one_cost(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(recipes, "step_cost", lambda config, name: measured.append(name) or 0.5)
    config = RecipesConfig(tmp_path, recipes="base,decay-1.0")
    assert recipes.step_costs(config) == {"base": 0.5} and measured == ["base"]
    more = dataclasses.replace(config, recipes="base,decay-1.0,adamw")
    assert recipes.step_costs(more) == {"base": 0.5, "adamw": 0.5} and measured == ["base", "adamw"]


def answered(prompt: int, tokens: int, rounds: int, temperature: float = 0.0, method: str = "eagle3:k=5") -> dict:
    """A prompt's row: so many tokens in so many rounds, the rest of them with the last one."""
    last = tokens - rounds + 1
    steps = [DecodeStep(5, 0, 1, 5)] * (rounds - 1) + [DecodeStep(5, last - 1, last, 5)]
    made = Generation([7] * tokens, DecodeTrace(steps, 0, 0), True)
    row = row_of(BenchPrompt(str(prompt), [1], number=prompt), method, temperature, made)
    return {**row, "prompt_ids": [1]}


def test_the_interval_is_that_of_the_drawn_seeds_and_prompts():
    base = [[answered(0, 4, 4), answered(1, 4, 4)], [answered(0, 4, 2), answered(1, 4, 2)]]
    better = [[answered(0, 4, 2), answered(1, 4, 2)], [answered(0, 4, 1), answered(1, 4, 1)]]
    found = compared(better, base)
    # All prompts alike: what differs are the seeds, 2 and 4. One in four resamples has one of them twice.
    assert found["seeds"] == [2.0, 4.0] and found["tau"] == 3.0 and found["tau_ci95"] == [2.0, 4.0]
    # With the same seeds, the base's 1 and 2 are half of it in every resample.
    assert found["ratio"] == 2.0 and found["ratio_ci95"] == [2.0, 2.0]
    # All seeds alike: what differs are the prompts, of taus 1 and 4.
    found = compared([[answered(0, 4, 4), answered(1, 4, 1)]] * 2, base)
    assert found["tau"] == pytest.approx(8 / 5) and found["tau_ci95"] == [1.0, 4.0]


def test_acceptance_is_conditional_on_the_tokens_before():
    rows = [answered(0, 4, 1), answered(1, 2, 1), answered(2, 6, 1)]  # three, one and five accepted of five
    assert acceptance([rows]) == [1.0, 2 / 3, 1.0, 0.5, 1.0]
    rows[0]["rounds"] = [{**step, "num_drafted": 3} for step in rows[0]["rounds"]]
    assert acceptance([rows]) == [1.0, 2 / 3, 1.0, 1.0, 1.0]


def test_a_run_is_trained_and_measured_by_commands_that_continue(tmp_path, monkeypatch):
    calls = []

    def python(*words: str) -> None:
        calls.append(words)
        name = " ".join(words[2:4])
        _, config = configure(name, words[4:])
        if name == "eval bench":
            methods = ["ar", *(named.label for named in parse_methods(config.methods))]
            temperatures = [params.temperature for params in config.modes]
            rows = [answered(prompt, 4, 2, t, method) for t in temperatures for method in methods for prompt in (0, 1)]
            write_rows(make_directory(config.output) / PER_PROMPT, rows)
        else:
            make_directory(config.output / "last")

    monkeypatch.setattr(recipes, "python", python)
    assert "tau 2.00 greedy, 2.00 T=1" in trained(RecipesConfig(tmp_path), "base", 0, 30)
    assert [words[2] for words in calls] == ["train", "eval"]
