"""SpecDec++'s study: its sweep on rollouts made by hand, its KL by the formula, its steps, and the whole command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hand_rollouts import hand_rollouts

from draftsmith.eval.replay.replay import head_probs
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.studies.forward_times import ForwardTimes
from draftsmith.eval.studies.specdecpp.kl import constant_kl, kl_rows
from draftsmith.eval.studies.specdecpp.study import (
    BEST_HEAD,
    BEST_K,
    BOUND,
    PUBLISHED,
    LoadedStudy,
    SpecDecPPConfig,
    choose_fastest,
    methods_by_head,
    theorem_h,
)
from draftsmith.eval.studies.specdecpp.sweep import LengthRule, front, published_head, replayed
from draftsmith.launch import specdecpp
from draftsmith.launch.cli import main
from draftsmith.launch.commands import configure
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.chains import ConfidenceStop, FixedK, SpecDecPlusPlus
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.types import InputError


def head_of(w_rej: float = 6.0, depth: int = 3, tied: bool = False, **more) -> AcceptanceHead:
    config = AcceptanceHeadConfig(4, num_blocks=depth, w_rej=w_rej, tied=tied, **more)
    return AcceptanceHead(config).requires_grad_(False)


def config_of(**changes) -> SpecDecPPConfig:
    given = {"output": Path("absent"), **changes}
    return SpecDecPPConfig("embedded:target", "embedded:draft", "embedded:prompts", **given)


@pytest.fixture(scope="module")
def settings():
    # The draft agrees with everything but every third token.
    rollouts = hand_rollouts([[i % 3 != 0 for i in range(13)]], depth=4, head="w6-d3")
    config = config_of(ks=(1, 2, 4), thresholds=(0.2, 0.9), min_drafted=1, max_drafted=4)
    return LoadedStudy(config, None, {"w6-d3": head_of()}, {}, {}).sweep(rollouts)


def test_fixed_k_and_the_oracle_by_hand(settings):
    """12 tokens after the first: rounds emit two accepted tokens and the target's own where K allows."""
    counts = {s.rule.label: (s.totals.num_target_calls, s.totals.num_draft_tokens) for s in settings}
    assert counts["K=2"] == (1 + 4, 4 * 2) and counts["K=4"] == (1 + 4, 4 * 4)
    # K=1: 1 accepted and 2; then 3 is the target's and the draft for it is lost, and so on.
    assert counts["K=1"] == (1 + 8, 8)
    oracle = next(s for s in settings if s.rule == LengthRule())
    assert counts["oracle"] == counts["K=2"] and oracle.totals.num_discarded == 0
    assert all(s.totals.num_tokens == 13 for s in settings)


def test_the_grid_is_every_k_every_threshold_raw_and_calibrated_and_the_oracle(settings):
    assert len(settings) == 3 + 2 + 2 * 2 + 1
    assert front(settings)[0].totals.discard_rate == 0


def test_rules_are_methods_of_the_bench():
    found = [
        parse_method(rule.method(2, 9))
        for rule in (LengthRule(k=3), LengthRule(t=0.4), LengthRule(head="a", h=0.7, calibrated=True))
    ]
    assert found == [FixedK(k=3), ConfidenceStop(t=0.4, max=9), SpecDecPlusPlus(h=0.7, min=2, max=9, calibrated=True)]


def test_a_calibrated_threshold_reads_the_corrected_output():
    logit = torch.tensor([[0.0, math.nan]]).numpy()
    assert head_probs(logit, head_of(), False)[0, 0] == 0.5
    assert head_probs(logit, head_of(), True)[0, 0] == pytest.approx(6 / 7)


def test_the_published_head_is_found_by_weight_and_depth():
    heads = {"a": head_of(1.0), "b": head_of(depth=2), "c": head_of(tied=True), "d": head_of()}
    assert published_head(heads) == "d" and published_head({"a": heads["a"]}) is None
    assert published_head({"e": head_of(state="before"), "f": head_of(features=("log_q",))}) is None


@pytest.mark.parametrize(("ks", "t_draft", "best"), [((1, 2, 4), 1.0, 2), ((1, 4), 1.0, 1), ((1, 4), 0.1, 4)])
def test_the_cost_model_chooses(settings, ks, t_draft, best):
    """(drafted, target calls): K=1 (8, 9), K=2 (8, 5), K=4 (16, 5)."""
    left = [s for s in settings if s.rule.k in (0, *ks)]
    study = LoadedStudy(config_of(), None, {"w6-d3": head_of()}, {}, {})
    assert choose_fastest(study, left, ForwardTimes(t_draft, 1.0, 1, 1))[BEST_K] == LengthRule(k=best)


def test_one_bench_for_each_head_with_the_fixed_k_in_all():
    rules = {BEST_K: LengthRule(k=5), BEST_HEAD: LengthRule(head="a", h=0.4), PUBLISHED: LengthRule(head="b", h=0.7)}
    methods = methods_by_head(rules.values(), config_of())
    assert methods == {
        "a": ["spec:k=5", "specdec++:h=0.4:min=2:max=20"],
        "b": ["spec:k=5", "specdec++:h=0.7:min=2:max=20"],
    }
    same = methods_by_head({**rules, PUBLISHED: LengthRule(head="a", h=0.4)}.values(), config_of())
    assert same == {"a": methods["a"]}


def test_kl_raw_and_corrected_by_the_formula():
    torch.manual_seed(0)
    hidden, label = torch.randn(50, 4), torch.rand(50)
    head = head_of(depth=0)
    (row,) = kl_rows({"x": head}, {"eval": (hidden, label)})
    p, logit = label.double(), (hidden @ head.out.weight[0] + head.out.bias).double()
    for key, said in (("eval_kl", torch.sigmoid(logit)), ("eval_kl_corrected", torch.sigmoid(logit + math.log(6)))):
        expected = (p * (p / said).log() + (1 - p) * ((1 - p) / (1 - said)).log()).mean()
        assert row[key] == pytest.approx(float(expected))
    assert (row["w_rej"], row["depth"]) == (6.0, 0)
    said = p.mean()
    expected = (p * (p / said).log() + (1 - p) * ((1 - p) / (1 - said)).log()).mean()
    assert constant_kl(label) == pytest.approx(float(expected))


def test_a_rule_that_knows_p_ends_with_the_token_that_is_rejected():
    """Greedily true probabilities are 1 and 0, and any threshold between sees the first 0."""
    rollouts = hand_rollouts([[i % 3 != 0 for i in range(13)]], depth=4)
    known, oracle = (
        pool(replayed(rollouts, rule, (3, 4), {})) for rule in (LengthRule(known=True, h=0.8), LengthRule())
    )
    assert known.num_target_calls == oracle.num_target_calls == 1 + 4
    assert (known.num_draft_tokens, oracle.num_draft_tokens) == (8 + 4, 8)
    assert LengthRule(known=True, h=0.8).label == "h=0.8, true p/q" and not LengthRule(known=True, h=0.8).can_run


def test_the_theorems_threshold_is_chosen_where_it_is_one(settings):
    heads = {"w6-d3": head_of()}
    study = LoadedStudy(config_of(), None, heads, {}, {})
    rule = choose_fastest(study, settings, ForwardTimes(0.2, 1.0, 1.0, 9))[BOUND]
    assert (rule.head, rule.h, rule.calibrated) == ("w6-d3", 0.8, True)
    assert theorem_h(ForwardTimes(1.0, 0.5, 1.0, 9)) is None and theorem_h(ForwardTimes(-0.1, 1.0, 1.0, 9)) is None
    assert BOUND not in choose_fastest(study, settings, ForwardTimes(1.0, 0.5, 1.0, 9))


@pytest.mark.parametrize("more", [{"state": "before", "features": ("log_q",)}, {"features": ("entropy",)}])
def test_labels_of_mixed_text_try_no_head_that_reads_more(more):
    tokens = torch.randn(5, 4), torch.rand(5)
    rows = kl_rows({"new": head_of(**more), "published": head_of()}, {"eval": tokens})
    assert [row["head"] for row in rows] == ["published"]


def test_every_step_is_a_command_that_parses():
    config = config_of(keep_tasks="rename", weights=(1.0, 6.0), depths=(0, 2))
    steps = [*specdecpp.label_steps(config), *specdecpp.training_steps(config)]
    assert len(steps) == 6 + 4
    for step in steps:
        assert configure(" ".join(step.argv[:2]), step.argv[2:])[1] is not None


def test_heads_that_exist_need_no_training_labels():
    config = config_of(heads=Path("somewhere"))
    assert specdecpp.training_steps(config) == []
    assert {step.done.parent.parent.name for step in specdecpp.label_steps(config)} == {"eval"}


def test_a_directory_is_of_one_study(tmp_path):
    specdecpp.remember_settings(config_of(output=tmp_path, epochs=2))
    specdecpp.remember_settings(config_of(output=tmp_path, epochs=2, num_threads=1))
    with pytest.raises(InputError, match=r"begun with epochs 2, expected epochs 3"):
        specdecpp.remember_settings(config_of(output=tmp_path, epochs=3))


@pytest.mark.parametrize(
    "changes", [{"thresholds": (0.5, 1.0)}, {"ks": (0,)}, {"depths": ()}, {"max_drafted": 1}, {"temperature": -1.0}]
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(InputError):
        config_of(**changes)


@pytest.mark.slow
def test_the_command_on_the_embedded_pair_and_its_continuation(tmp_path, capsys):
    argv = ["eval", "specdecpp", "--config", "specdecpp", "--keep_tasks", "rename", "--depths", "0", "--weights", "6"]
    argv += ["--train_prompts", "4", "--label_prompts", "2", "--dev_prompts", "2", "--test_prompts", "2"]
    argv += ["--epochs", "1", "--max_new_tokens", "12", "--ks", "1,3", "--thresholds", "0.3,0.7", "--max_drafted", "4"]
    argv += ["--num_threads", "1", "--output", str(tmp_path)]
    assert main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["kind"] == "specdecpp" and results["summary"]["best fixed K: rule"] in ("K=1", "K=3")
    figures = {figure.name: figure for figure in from_json(results)}
    rows = {row["role"]: row for row in figures["specdecpp-throughput"].rows}
    assert rows[BEST_HEAD]["measured"] > 0 and rows["greedy oracle (lemma 2.1)"].get("measured") is None
    assert rows["greedy oracle (lemma 2.1)"]["test_theory"] >= rows[BEST_K]["test_theory"]
    (kl,) = figures["specdecpp-kl"].rows
    assert kl["paper"] == 0.637 and kl["eval_kl"] > 0
    capsys.readouterr()
    assert main(argv) == 0
    shown = capsys.readouterr().err
    done = [line for line in shown.splitlines() if "done before" in line]
    assert len(done) == 6 + 1 + 2  # data, the head, two benches
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["tables"] == results["tables"]
