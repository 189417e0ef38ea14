"""`eval tune` weighs settings by replayed rounds and measured costs, and writes a file that decode and bench take."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml

from draftsmith.eval.bench.command import asked_for
from draftsmith.eval.cost import machine
from draftsmith.eval.cost.machine import DecodingCosts, DraftCost, Overhead
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.tuning.candidates import Grid, Recorded, best_of_families, predict, probes
from draftsmith.eval.tuning.reasoning import Choice, precision_words
from draftsmith.eval.tuning.tune import PRECISIONS, precision_speeds, prepare
from draftsmith.launch.cli import main
from draftsmith.launch.commands import configure
from draftsmith.modules.drafters.chains import ByPrediction
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.engine.low_precision import can_int8

GIVEN = {"draft": "d", "eagle": "e", "acceptance": "a"}
SMALL = ["--depth", "3", "--tree-depth", "1", "--topk", "2", "--verify", "2", "--repeats", "1",
         "--limit", "2", "--max-new-tokens", "10", "--ignore-eos"]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(models, tmp_path_factory):
    """A run on tiny models: its directory. Costs are taken from less than elsewhere: nothing here rests on them."""
    output = tmp_path_factory.mktemp("tune")
    flags = [word for name in ("draft", "acceptance", "target", "prompts") for word in (f"--{name}", models[name])]
    flags += ["--draft", models["eagle"]]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PROBE_TOKENS", 8), ("PROBE_REPEATS", 1), ("PROPOSALS", 4)):
            patch.setattr(machine, name, value)
        assert main(["eval", "tune", *flags, *SMALL, "--output", str(output)]) == 0
    return output


def test_the_precision_of_drafts_is_the_fastest_of_those_that_were_decoded(tuned):
    summary = json.loads((tuned / "results.json").read_text())["summary"]
    content = yaml.safe_load((tuned / "decode.yaml").read_text())
    speeds = {bits: summary.get(f"{bits}_tokens_per_s") for bits in PRECISIONS}
    if parse_methods(summary["chosen"])[0].method.needs:
        assert summary["draft_precision"] == content["draft_precision"] == max(speeds, key=lambda b: speeds[b] or 0)
        assert None not in [speeds["dtype"], speeds["bf16"]]
    else:
        assert summary["draft_precision"] is None and content["draft_precision"] == "dtype"


def test_precisions_are_decoded_by_the_same_drafter_in_other_bits(models):
    flags = [word for name in ("draft", "target", "prompts") for word in (f"--{name}", models[name])]
    _, config = configure("eval tune", [*flags, *SMALL, "--output", "unused"])
    setup = prepare(config)
    chosen = parse_methods("spec:k=2")[0]
    speeds = precision_speeds(config, setup, chosen)
    assert set(speeds) == {bits for bits in PRECISIONS if bits != "int8" or can_int8()} and min(speeds.values()) > 0
    assert precision_speeds(dataclasses.replace(config, draft_precision="bf16"), setup, chosen) == {}
    assert precision_speeds(config, setup, parse_methods("pld:k=2")[0]) == {}
    choice = Choice([], {}, None, {}, {"dtype": 5.0, "int8": 7.0})
    assert choice.precision == "int8" and "int8 7" in precision_words(choice)


def test_the_choice_is_the_best_of_its_own_table(tuned):
    results = json.loads((tuned / "results.json").read_text())
    assert results["meta"]["kind"] == "tune" and results["meta"]["settings"]["depth"] == 3
    table, *charts = from_json(results)
    assert table.columns and not any(chart.columns for chart in charts)
    (chosen,) = [row for row in table.rows if row["chosen"]]
    measured = [row["measured"] for row in table.rows if row["measured"] is not None]
    assert chosen["measured"] == max(measured) and chosen["setting"] == results["summary"]["chosen"]
    assert len(measured) == 3  # two finalists and ar
    predicted = [row["predicted"] for row in table.rows]
    assert predicted == sorted(predicted, reverse=True)
    families = {row["family"] for row in table.rows}
    assert families == {"ar", "pld", "spec", "eagle", "confidence", "self-verify", "specdec++", "confidence/eagle",
                        "cost", "online", "online/eagle",
                        "self-verify/eagle", "eagle2/2"}  # fmt: skip
    # The table has the highest point of every line of the charts.
    best = {row["family"]: row["predicted"] for row in table.rows}
    for chart in charts:
        if chart.name.startswith("predicted"):
            for family in {row["family"] for row in chart.rows}:
                assert max(row["tokens_per_s"] for row in chart.rows if row["family"] == family) == best[family]


def test_decode_and_bench_take_the_file(tuned, models, capsys, tmp_path):
    file = str(tuned / "decode.yaml")
    method = yaml.safe_load((tuned / "decode.yaml").read_text())["method"]
    assert main(["decode", "--config", file, "What is it?", "--max-new-tokens", "4"]) == 0
    assert f"{method}: drafted" in capsys.readouterr().err
    _, config = configure("eval bench", ["--config", file, "--prompts", models["prompts"], "--output", str(tmp_path)])
    assert config.method == method and config.ignore_eos
    assert asked_for(config) == ("ar" if method == "ar" else f"ar,{method}")
    assert asked_for(dataclasses.replace(config, methods=f"ar, {method}")) == f"ar, {method}"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--draft"),
        (["--draft", "eagle", "--acceptance", "acceptance"], "a head for what draft drafts, which is not given"),
        (["--draft", "draft", "--topk", "4,x"], "topk: found '4,x'"),
        (["--draft", "draft", "--topk", "0"], "1 or more"),
        (["--draft", "eagle", "--topk", "100000"], "the vocabulary"),
        (["--draft", "draft", "--depth", "0"], "depth"),
        (["--draft", "draft", "--split", "none-such"], "no matching row"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(models, capsys, tmp_path, flags, expected):
    flags = [models.get(word, word) for word in flags]
    words = ["--target", models["target"], "--prompts", models["prompts"], *flags, "--output", str(tmp_path / "out")]
    assert main(["eval", "tune", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and expected in err
    assert not (tmp_path / "out").exists()


def rollouts(accepted: list[int], depth: int) -> ChainRollouts:
    """One answer in which the round before token t accepts accepted[t - 1] tokens."""
    count = len(accepted)
    answer = TargetAnswer("a", "", 10, list(range(count + 1)), False, count + 1)
    nothing = np.full((count, depth), np.nan)
    return ChainRollouts(
        [answer], np.zeros(count, np.int64), np.arange(1, count + 1), np.zeros((count, depth), np.int64),
        np.array(accepted), nothing, nothing, nothing, nothing, nothing,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accepts", "row_s", "step_s", "best"),
    [(4, 0.0, 0.01, "spec:k=4"), (2, 0.0, 0.01, "spec:k=2"), (2, 0.3, 0.1, "spec:k=2"), (2, 1.5, 0.1, "ar"),
     (4, 0.0, 1.5, "ar")],
)  # fmt: skip
def test_the_setting_that_pays_depends_on_the_costs(accepts, row_s, step_s, best):
    """In every round so many tokens would be accepted. A target call takes 1 s and row_s for every drafted token: k = 2
    emits 3 tokens in 1 + 2 (row_s + step_s) seconds, no draft one in a second."""
    curve = {1: 1.0, 9: 1.0 + 8 * row_s}
    costs = DecodingCosts(10, 0.0, curve, curve, {"draft": DraftCost(0, step_s, step_s)})
    recorded = Recorded({"draft": rollouts([accepts] * 60, 4)}, {}, None)
    predicted = predict(parse_methods("ar,spec:k=1,spec:k=2,spec:k=3,spec:k=4"), recorded, costs)
    assert Choice(predicted, {}, costs, {}).label == best
    speeds = {item.label: item.tokens_per_s for item in predicted}
    assert speeds["ar"] == pytest.approx(61 / 60)  # the first token came with the prefill, which is free here
    assert speeds["spec:k=1"] == pytest.approx(61 / (30 * (1 + row_s + step_s)))
    assert speeds["spec:k=2"] == pytest.approx(61 / (20 * (1 + 2 * (row_s + step_s))))
    assert best_of_families(predicted)[0].family == best.partition(":")[0]


def test_the_grid_holds_what_the_models_allow():
    grid = Grid(16, 6, (4, 8))
    named = grid.settings(GIVEN, "draft")  # every one is a method, none is there twice
    labels = {item.label for item in named}
    assert {f"spec:k={k}" for k in range(1, 17)} <= labels
    families = probes(named)
    assert {"ar", "pld", "spec", "eagle", "specdec++", "eagle2/4", "eagle2/8"} <= set(families)
    assert all(len(settings) == (1 if family == "ar" else 2) for family, settings in families.items())
    assert not [item for item in grid.settings({"draft"}, None) if "eagle" in item.label or "specdec" in item.label]
    for depth in (1, 2, 3):  # no longer drafts than were recorded, and none twice
        short = Grid(depth, 1, (4,)).settings(GIVEN, "draft")
        assert max(item.method.max for item in short if isinstance(item.method, ByPrediction)) == depth
    of_head = [item.label for item in grid.settings(GIVEN, "eagle") if item.label.startswith("specdec++")]
    assert of_head and all(label.endswith("drafter=eagle") for label in of_head)


def test_what_a_round_takes_beyond_its_forwards_counts():
    flat = {1: 1.0, 9: 1.0}
    costs = DecodingCosts(10, 0.0, flat, flat, {"draft": DraftCost(0, 0, 0)}, {"spec": Overhead(9.0, 0)})
    recorded = Recorded({"draft": rollouts([1] * 20, 2)}, {}, None)
    assert Choice(predict(parse_methods("ar,spec:k=1"), recorded, costs), {}, costs, {}).label == "ar"
