"""`eval tune` halves settings by real rounds, and writes a file that decode and bench take."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from tiny_world import draft_words

from draftsmith.eval import tune
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.tune import PRECISIONS, halve, precision_speeds, settings_to_try
from draftsmith.launch.cli import main
from draftsmith.launch.commands import configure
from draftsmith.modules.drafters.chains import Bounded
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.engine.low_precision import can_multiply
from draftsmith.modules.types import InputError

SMALL = ["--depth", "3", "--tree-depth", "1", "--finalists", "2", "--repeats", "1",
         "--limit", "2", "--max-new-tokens", "10", "--ignore-eos"]  # fmt: skip


def config_of(models, *flags: str, drafts=("draft",)):
    given = {name: models[name] for name in ("target", "prompts", *drafts)}
    return configure("eval tune", [*draft_words(given), *SMALL, *flags, "--output", "unused"])[1]


@pytest.fixture(scope="module")
def tuned(models, tmp_path_factory):
    """A run on tiny models, with speeds of precisions that no clock took: its directory."""
    output = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "precision_speeds", lambda *_: {"dtype": 5.0, "int8": 9.0, "int4": 7.0})
        assert main(["eval", "tune", *draft_words(models), *SMALL, "--output", str(output)]) == 0
    return output


def test_the_choice_is_the_fastest_finalist(tuned):
    results = json.loads((tuned / "results.json").read_text())
    assert results["meta"]["kind"] == "tune" and results["meta"]["settings"]["depth"] == 3
    (table,) = from_json(results)
    (chosen,) = [row for row in table.rows if row["chosen"]]
    assert chosen["setting"] == results["summary"]["chosen"]
    speeds = [row["tokens_per_s"] for row in table.rows]
    assert len(speeds) == 3 and chosen["tokens_per_s"] == max(speeds) and speeds == sorted(speeds, reverse=True)
    for row in table.rows:
        low, high = row["speedup_ci95"]
        assert low <= row["speedup"] <= high


def test_the_precision_of_drafts_is_the_fastest_that_was_measured(tuned):
    summary = json.loads((tuned / "results.json").read_text())["summary"]
    content = yaml.safe_load((tuned / "decode.yaml").read_text())
    assert summary["draft_precision"] == content["draft_precision"] == "int8"
    assert [summary[f"{bits}_tokens_per_s"] for bits in PRECISIONS] == [5, 9, 7]


def test_precisions_are_measured_with_the_chosen_setting(models):
    config = config_of(models)
    prompts = read_prompts(config.prompts, config.target, limit=1)
    loaded = tune.load_run(config, parse_methods("spec:k=2"), prompts, config.max_new_tokens, config.sampling)
    chosen = parse_methods("spec:k=2")[0]
    speeds = precision_speeds(config, prompts, loaded, chosen)
    assert set(speeds) == set(filter(can_multiply, PRECISIONS)) and min(speeds.values()) > 0
    given = dataclasses.replace(config, draft_precision="int8")
    assert precision_speeds(given, prompts, loaded, chosen) == {}
    assert precision_speeds(config, prompts, loaded, parse_methods("pld:k=2")[0]) == {}


def test_decode_and_bench_take_the_file(tuned, models, capsys, tmp_path):
    file = str(tuned / "decode.yaml")
    method = yaml.safe_load((tuned / "decode.yaml").read_text())["method"]
    assert main(["decode", "--config", file, "What is it?", "--max-new-tokens", "4"]) == 0
    assert f"{method}: drafted" in capsys.readouterr().err
    _, config = configure("eval bench", ["--config", file, "--prompts", models["prompts"], "--output", str(tmp_path)])
    assert config.method == method and config.ignore_eos


def test_an_acceptance_head_needs_its_drafter(models, tmp_path):
    given = {"acceptance": models["acceptance"], "output": tmp_path}
    config = dataclasses.replace(config_of(models, drafts=("eagle",)), **given)
    with pytest.raises(InputError, match="a head for what draft drafts, which is not given"):
        tune.run(config)


@pytest.mark.parametrize("num_prompts", [1, 5, 16])
def test_halving_keeps_the_fastest(models, monkeypatch, num_prompts):
    """Setting number i takes 1 + i seconds a token, with noise that a single prompt does not tell apart."""
    config = config_of(models, "--finalists", "3")
    labels = ["ar", *(f"setting-{i}" for i in range(12))]
    asked: list[tuple[int, int]] = []

    def measured(config, prompts, runners, repeats):
        assert repeats == 1 and "ar" not in runners
        asked.append((len(prompts), len(runners)))
        return [
            {"method": label, "tokens": 10, "num_target_calls": 5,
             "cpu_s": 10 * (1 + int(label.split("-")[1]) + 0.4 * (prompt.number % 2))}
            for prompt in prompts for label in runners
        ]  # fmt: skip

    monkeypatch.setattr(tune, "measure_rows", measured)
    prompts = [BenchPrompt(str(n), [1, 2], number=n) for n in range(num_prompts)]
    assert halve(config, prompts, dict.fromkeys(labels)) == ["ar", "setting-0", "setting-1", "setting-2"]
    assert asked == [(1, 12), (1, 6), (2, 3)][: {1: 1, 5: 2, 16: 2}[num_prompts]]


def test_settings_follow_from_the_models(models):
    config = config_of(models, "--depth", "16", "--tree-depth", "6", drafts=("draft", "eagle"))
    tried = settings_to_try(config, "draft")
    labels = {named.label for named in tried}
    assert tried[0].label == "ar" and all(named.method.lossless for named in tried)
    assert {"spec:k=1", "spec:k=16", "eagle:k=5", "pld:k=6:ngram=3", "cost:max=16", "online:head=on:max=16"} <= labels
    assert {"eagle2:nodes=60:depth=6:topk=8", "eagle2:nodes=6:depth=1:topk=4"} <= labels
    assert "eagle2:nodes=40:depth=1:topk=4" not in labels  # more nodes than there are candidates
    only = settings_to_try(config_of(models, "--depth", "16"), None)
    assert not [named for named in only if "eagle" in named.label or "specdec" in named.label]
    for depth in (1, 2, 3):
        short = settings_to_try(config_of(models, "--depth", str(depth)), "draft")
        assert max(named.method.max for named in short if isinstance(named.method, Bounded)) == depth
