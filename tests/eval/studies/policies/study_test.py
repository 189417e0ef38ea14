"""The comparison of stop policies: on rollouts made by hand, by sums on paper, and as a command on tiny models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_rollouts import hand_rollouts
from quick_heads import varied_acceptance_head

from draftsmith.data.heads.directory import drafter_identity, save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.studies.policies import prompts
from draftsmith.eval.studies.policies.comparison import (
    FITTED,
    FIXED,
    KNOWN,
    ORACLE,
    DrafterMode,
    Gain,
    Policy,
    PolicyComparison,
    PolicyGrid,
    PolicyReplay,
    compare_policies,
    gain,
    rate,
)
from draftsmith.eval.studies.policies.prompts import KnownGrams, copied_shares, parted, training_texts
from draftsmith.eval.studies.policies.settings import PoliciesConfig
from draftsmith.eval.studies.policies.study import has_labels_of
from draftsmith.eval.studies.policies.tables import copying_table, head_rows, predictions, tables_of
from draftsmith.launch.cli import main
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.types import InputError, SamplingParams

GRID = PolicyGrid(ks=(1, 2, 4), ts=(0.3, 0.6), hs=(0.3, 0.7), maxima=(2, 4))
CS = (0.1, 0.5)
GREEDY = SamplingParams()


def head_of(**changes) -> AcceptanceHead:
    return AcceptanceHead(AcceptanceHeadConfig(8, num_blocks=1, **changes)).requires_grad_(False)


def hand(answers: int, seed: int) -> ChainRollouts:
    rng = np.random.default_rng(seed)
    return hand_rollouts((rng.random((answers, 25)) < 0.7).tolist(), depth=4, seed=seed)


def scene_of(params: SamplingParams) -> DrafterMode:
    """Made by hand; when sampling, the predictor that knows p/q knows the accept draw."""
    dev, test = hand(6, 0), hand(7, 1)
    if not params.greedy:
        dev, test = (dataclasses.replace(own, accept_along=np.nan_to_num(own.accept_prob)) for own in (dev, test))
    return DrafterMode("draft", params, {"head": head_of(w_rej=6.0)}, dev, test)


@pytest.fixture(scope="module")
def compared() -> PolicyComparison:
    scene = scene_of(SamplingParams(1.0))
    return compare_policies(scene, GRID, CS, np.linspace(0, 1, 7).tolist(), np.linspace(1, 0, 7).tolist(), seed=0)


def player(agreed: list[list[bool]]) -> PolicyReplay:
    rollouts = hand_rollouts(agreed, depth=4)
    return PolicyReplay(DrafterMode("draft", GREEDY, {}, rollouts, rollouts), rollouts)


def test_time_is_a_round_and_c_a_drafted_token():
    """The draft agrees with everything but every third token; 12 tokens follow the first."""
    own = player([[i % 3 != 0 for i in range(13)]])
    # K=2: rounds accept two tokens and add the target's own: 4 rounds, 8 drafted, and the prefill.
    assert own.pairs(Policy("k", 2), 0.5).tolist() == [[13, 1 + 4 + 0.5 * 8]]
    # K=4: the same rounds draft two tokens more, but for the last: nothing is left to draft behind it.
    assert own.pairs(Policy("k", 4), 0.1)[0, 1] == pytest.approx(1 + 4 + 0.1 * 16)
    assert own.pairs(Policy("oracle"), 0.5).tolist() == own.pairs(Policy("k", 2), 0.5).tolist()
    assert own.best((Policy("k", 1), Policy("k", 2), Policy("k", 4)), 0.1) == Policy("k", 2)


def test_dear_drafts_are_short_and_cheap_ones_long():
    own = player([[True] * 7 + [False] * 6, [True] * 13])
    ks = [Policy("k", k) for k in (1, 2, 4)]
    assert own.best(ks, 0.01).value == 4 and own.best(ks, 5.0).value == 1


def test_a_gain_is_a_ratio_of_sums_and_its_interval_of_paired_prompts():
    own, base = np.array([[10.0, 4.0], [30.0, 6.0]]), np.array([[10.0, 5.0], [30.0, 6.0]])
    assert rate(own) == 4.0
    found = gain(own, base, seed=0)
    assert found.value == pytest.approx(0.1)  # 40/10 over 40/11
    # The resamples: both prompts, twice the first (5/4 - 1), twice the second (nothing).
    assert (found.low, found.high) == (0.0, 0.25)
    alone = gain(own[:1], base[:1], 0)
    assert alone.value == 0.25 and np.isnan(alone.low) and alone.text == "+25.0%"


def test_settings_are_chosen_on_dev_and_tried_on_others(compared):
    scene = compared.scene
    dev = PolicyReplay(scene, scene.dev)
    for at in compared.at:
        rates = {k: rate(dev.pairs(Policy("k", k), at.c)) for k in GRID.ks}
        assert rates[at.fixed.policy.value] == max(rates.values())
        for chosen in at.chosen.values():
            assert chosen.policy in chosen.family.policies
            expected = rate(dev.pairs(chosen.policy, at.c)) / max(rates.values()) - 1
            assert chosen.dev_gain == pytest.approx(expected)
        assert compared.gain(at, at.fixed) == Gain(0.0, 0.0, 0.0)
    assert [at.own for at in compared.at] == [False, True]


def test_a_policy_that_knows_the_accept_draw_beats_those_that_do_not(compared):
    """In these rollouts `accept_along` is the accept draw itself: the first token that will be rejected is the last."""
    at = compared.at[0]
    oracle = compared.totals(at, at.chosen[f"{KNOWN}, cost rule"].policy)
    rounds = oracle.num_target_calls - oracle.prompts
    assert oracle.num_discarded <= rounds  # one a round that met a rejection
    best = max(compared.gain(at, chosen).value for chosen in at.of("free"))
    assert compared.gain(at, at.chosen[f"{KNOWN}, cost rule"]).value > best
    assert compared.totals(at, at.chosen[ORACLE].policy).num_discarded == 0


def test_the_logistic_of_q_is_fitted_on_dev_only():
    scene = dataclasses.replace(scene_of(GREEDY), heads={})
    other = dataclasses.replace(scene, dev=scene.test, test=scene.dev)
    fitted = PolicyReplay(scene, scene.test).predictor(FITTED)
    swapped = PolicyReplay(other, other.test).predictor(FITTED)
    log_q = scene.test.log_q[0, 0]
    # The same confidence means another probability where the fit is another.
    x = np.log(np.exp(log_q) / (1 - np.exp(log_q)))
    view = dataclasses.make_dataclass("View", ["num_drafted"])(1)
    first = np.log(fitted.prob(view) / (1 - fitted.prob(view)))
    again = PolicyReplay(scene, scene.test).predictor(FITTED).prob(view)
    assert fitted.prob(view) == again and np.isfinite([x, first]).all()
    assert swapped.prob(view) != fitted.prob(view)


def test_families_are_what_is_compared():
    heads = {"published": head_of(w_rej=6.0), "new": head_of(w_rej=1.0, state="before", features=("log_q",))}
    families = {family.name: family for family in GRID.families(heads, knows_p=False)}
    assert f"{KNOWN}, cost rule" not in families and "new: raw, threshold" not in families
    assert families["published: raw, h 0.7 as published"].policies == (
        Policy("h", 0.7, "published, raw", minimum=2, maximum=4),
    )
    assert "new: raw, h 0.7 as published" not in families
    assert len(families["published: calibrated, threshold"].policies) == 2 * 2
    assert {family.role for family in families.values()} == {"fixed", "free", "looking", "fitted", "head", "oracle"}


def test_the_head_is_held_against_the_best_of_every_other_kind(compared):
    rows = list(head_rows([compared]))
    assert len(rows) == 4 * len(CS)
    by_what = {what: [row for row in rows if row["what"] == what] for what in {row["what"] for row in rows}}
    for at, of_fixed, of_free, of_looking, share in zip(
        compared.at,
        by_what["head over the best fixed K"],
        by_what["head over the best training-free that goes by confidence"],
        by_what["head over the training-free that looks for repetitions"],
        by_what["share of the gain with true p/q known"],
        strict=True,
    ):
        head = at.best("head")
        assert head.dev_gain == max(chosen.dev_gain for chosen in at.of("head"))
        for row, base in ((of_fixed, at.fixed), (of_free, at.best("free")), (of_looking, at.best("looking"))):
            made = compared.gain(at, head, base)
            assert row["value"] == pytest.approx(made.value, rel=1e-4, abs=1e-9)
            assert (row["c"], row["interval"], row["base"]) == (at.name, made.ends, base.family.name)
        most = compared.gain(at, at.best("ceiling")).value
        assert share["value"] == pytest.approx(compared.gain(at, head).value / most, rel=1e-4)
    assert (
        list(
            head_rows(
                [compare_policies(dataclasses.replace(compared.scene, heads={}), GRID, CS, [0.0] * 7, [0.0] * 7, 0)]
            )
        )
        == []
    )


def test_figures_cover_policies_tasks_overlap_and_quality(compared):
    figures = {figure.name: figure for figure in tables_of([compared], [])}
    gains = {row["policy"]: row for row in figures["policies-gains-draft-t1"].rows}
    at = compared.at[0]
    assert gains[FIXED]["c0"] == at.fixed.policy.label
    assert gains[ORACLE]["c0"] == compared.gain(at, at.chosen[ORACLE]).text
    tasks = {row["task"]: row["prompts"] for row in figures["policies-by-task"].rows}
    assert tasks == {"even": 4, "odd": 3}
    thirds = [row for row in figures["policies-overlap"].rows if row["at"] == at.name]
    assert [(row["count"], round(row["overlap"], 3)) for row in thirds] == [(3, 0.167), (4, 0.75)]
    quality = {row["predictor"]: row for row in figures["policies-quality"].rows}
    tokens, everything = predictions(compared.scene)
    said = everything["head"].prob
    brier = np.square(said.numpy() - tokens.accept_prob.numpy()).mean()
    assert quality["head"]["brier"] == pytest.approx(brier, rel=1e-4)
    assert quality["head"]["tokens"] == compared.scene.test.verified().sum()
    for figure in figures.values():
        assert all(column.key in row for row in figure.rows[:1] for column in figure.columns), figure.name


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_table_of_ngrams_is_their_set_in_eight_bytes_each(n, monkeypatch):
    """Beside a set of tuples, over few tokens, so that texts share many; some at a time as all together."""
    monkeypatch.setattr(prompts, "HASHED_TOGETHER", 50)
    rng = np.random.default_rng(n)
    texts = [rng.integers(7, size=length).tolist() for length in (0, 3, 8, 40, 200, 7, 90)]
    grams = {tuple(own[i : i + n]) for own in texts for i in range(len(own) - n + 1)}
    known = KnownGrams(texts, n)
    assert len(known) == len(grams) and known._hashes.nbytes == 8 * len(grams)
    for _ in range(20):
        answer = rng.integers(8, size=30).tolist()
        own = [tuple(answer[i : i + n]) for i in range(30 - n + 1)]
        assert known.share(answer) == pytest.approx(sum(gram in grams for gram in own) / len(own))


def test_overlap_by_hand():
    known = KnownGrams([[1, 2, 3, 4], [7, 8]], 3)
    assert len(known) == 2  # (1, 2, 3) and (2, 3, 4)
    assert known.share([0, 1, 2, 3, 9]) == pytest.approx(1 / 3)
    assert known.share([1, 2]) == KnownGrams([], 3).share([1, 2, 3]) == 0.0 and not len(KnownGrams([], 3))
    scene = DrafterMode("draft", GREEDY, {}, hand(2, 0), hand(4, 0))
    found = compare_policies(scene, GRID, CS, [0.5, 0.1, 0.9, 0.1], [0.2, 0.3, 0.0, 1.0], 0)
    assert found.least_known.tolist() == [False, True, False, True]
    assert found.copies.tolist() == [False, True, False, True]


def test_gains_are_told_apart_for_answers_that_copy(compared):
    """Answer 0 copies all, answer 6 nothing."""
    rows = {(row["at"], row["prompts"]): row for row in copying_table([compared]).rows}
    assert {counts for counts in ((kind, row["count"]) for (_, kind), row in rows.items())} == {
        ("copying", 5),
        ("new text", 2),
    }
    at = compared.own
    head = at.best("head")
    mask = np.array([True] * 5 + [False] * 2)
    assert rows[at.name, "copying"]["best head"] == compared.gain(at, head, mask=mask).text
    assert rows[at.name, "new text"]["best head"] == compared.gain(at, head, mask=~mask).text
    assert rows[at.name, "copying"]["copied"] == pytest.approx(2 / 3)


def test_copied_share_by_hand():
    prompt = BenchPrompt("a", [1, 2, 3, 4, 5])
    answer = TargetAnswer("a", "t", 5, [9, 1, 2, 3, 4, 5, 7, 8], True, 8)
    assert copied_shares([prompt], [answer]) == [2 / 8]  # 4 and 5, the fourth and the fifth of a repetition


def test_heads_are_used_in_the_mode_of_their_labels(tmp_path):
    made_with = {"greedy": {"temperature": 0.0}, "warm": {"temperature": [1.0]}, "range": {"temperature": [0.0, 0.5]}}
    for name in (*made_with, "unknown"):
        save_head(tmp_path / name, head_of(), {"sampling": made_with.get(name)}, "card")

    def used(params: SamplingParams) -> list[str]:
        return [name for name in (*made_with, "unknown") if has_labels_of(tmp_path / name, params)]

    assert used(GREEDY) == ["greedy", "range", "unknown"]
    assert used(SamplingParams(0.7)) == ["warm", "range", "unknown"]


def test_policies_are_methods_of_the_bench():
    found = [
        Policy("k", 3).method("draft", 0.1), Policy("k", 3).method("eagle", 0.1),
        Policy("t", 0.4, maximum=9).method("eagle", 0.1), Policy("entropy", maximum=6).method("draft", 0.1),
        Policy("h", 0.7, "a, raw", 2, 9).method("draft", 0.1), Policy("h", 0.7, "a", maximum=9).method("eagle", 0.1),
    ]  # fmt: skip
    assert found == [
        "spec:k=3", "eagle:k=3", "confidence:t=0.4:min=1:max=9:drafter=eagle", "self-verify:k=6",
        "specdec++:h=0.7:min=2:max=9", "specdec++:h=0.7:min=1:max=9:drafter=eagle:calibrated=on",
    ]  # fmt: skip
    for method in found:
        parse_method(method)
    assert Policy("h", 0.5, FITTED).method("draft", 0.1) is Policy("oracle").method("draft", 0.1) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"draft": None}, "draft"), ({"eagle_heads": Path("x")}, "heads"), ({"hs": "0.5,1"}, "hs"),
     ({"ngram": 0}, "ngram"), ({"cs": "0"}, "cs"), ({"max_drafted": 0}, "max_drafted")],
)  # fmt: skip
def test_impossible_settings_are_refused(changes, field):
    given = {"target": "t", "prompts": "p", "draft": "d", "output": Path("o"), **changes}
    with pytest.raises(InputError) as error:
        PoliciesConfig(**given).check()
    assert error.value.field == field


def some_prompts(path, count: int, **more: str) -> str:
    rows = [{"id": f"p{i}", "prompt": "Rename a to b: " * (i + 1), **more} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("given", [{}, {"split": "none", "dev_split": "none"}, {"split": "none"}])
def test_a_file_without_splits_is_parted_by_a_rule(models, tmp_path, given):
    prompts = some_prompts(tmp_path / "plain.jsonl", 9)
    config = PoliciesConfig(target=models["target"], prompts=prompts, draft="d", limit=5, output=tmp_path, **given)
    dev, reported = parted(config)
    assert [prompt.id for prompt in dev] == ["p6", "p7", "p8"]  # the last quarter, rounded up
    assert (reported.split, reported.limit, reported.bench_limit) == (None, 5, 5)
    dev, reported = parted(dataclasses.replace(config, limit=0, dev_limit=1))
    assert [prompt.id for prompt in dev] == ["p6"] and reported.limit == 6
    assert list(training_texts(config)) == []


def test_other_prompts_may_be_for_choosing(models, tmp_path):
    prompts, dev_prompts = some_prompts(tmp_path / "a.jsonl", 3), some_prompts(tmp_path / "b.jsonl", 2)
    config = PoliciesConfig(
        target=models["target"], prompts=prompts, draft="d", dev_prompts=dev_prompts, output=tmp_path
    )
    dev, reported = parted(config)
    assert [prompt.id for prompt in dev] == ["p0", "p1"] and (reported.split, reported.limit) == (None, 120)
    tagged = some_prompts(tmp_path / "c.jsonl", 4, split="dev")
    dev, reported = parted(dataclasses.replace(config, dev_prompts=tagged, dev_limit=3))
    assert len(dev) == 3


def test_none_is_no_split_and_prompts_are_never_in_both_parts(models, tmp_path):
    tagged = some_prompts(tmp_path / "c.jsonl", 8, split="dev")
    config = PoliciesConfig(
        target=models["target"], prompts=tagged, draft="d", split="none", dev_split="none", output=tmp_path
    )
    dev, reported = parted(config)
    assert [prompt.id for prompt in dev] == ["p6", "p7"] and (reported.split, reported.limit) == (None, 6)
    with pytest.raises(InputError, match="dev_split: found dev, with split none"):
        parted(dataclasses.replace(config, dev_split="dev"))
    with pytest.raises(InputError, match="dev_split: found none, with split dev"):
        parted(dataclasses.replace(config, split="dev"))
    with pytest.raises(InputError, match="prompts: found 1 prompt"):
        parted(dataclasses.replace(config, prompts=some_prompts(tmp_path / "one.jsonl", 1)))


def test_the_command_on_tiny_models(models, tmp_path, capsys):
    """Both drafters, both modes."""
    target, draft = load_lm(models["target"]), load_lm(models["draft"])
    config = AcceptanceHeadConfig(32, num_blocks=1, w_rej=1.0, state="before", features=("log_q", "entropy"))
    before = AcceptanceHead(config)
    torch.nn.init.normal_(before.out.weight)
    for folder, identity in (
        ("draft", draft.info.identity), ("eagle", drafter_identity(models["eagle"], target))
    ):  # fmt: skip
        for name, head, temperature in (("old", varied_acceptance_head(32), 0.0), ("new", before, 1.0)):
            sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
            save_head(tmp_path / folder / name, head, {"target": identity, "sampling": sampling}, "card")
    argv = ["eval", "policies", "--target", models["target"], "--draft", models["draft"], "--draft", models["eagle"]]
    argv += ["--heads", str(tmp_path / "draft"), "--heads", str(tmp_path / "eagle")]
    argv += ["--prompts", models["prompts"], "--dev_split", "test", "--limit", "3", "--dev_limit", "2"]
    argv += ["--max_drafted", "4", "--max_new_tokens", "10", "--cs", "0.2", "--hs", "0.3,0.7", "--ts", "0.5"]
    argv += ["--bench_limit", "0", "--ngram", "3", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    kept = tmp_path / "out" / "results.json"
    results = json.loads(kept.read_text())
    assert results["meta"]["kind"] == "policies" and set(results["meta"]["c"]) == {"draft", "eagle"}
    figures = {figure.name: figure for figure in from_json(results)}
    scenes = {row["scene"] for row in figures["policies-head"].rows}
    assert scenes == {"draft model, greedy", "draft model, T=1", "EAGLE chain, greedy", "EAGLE chain, T=1"}
    policies = [row["policy"] for row in figures["policies-gains-eagle-t1"].rows]
    assert "new: calibrated, cost rule" in policies and not any(name.startswith("old") for name in policies)
    capsys.readouterr()
    second = argv.index(str(tmp_path / "eagle")) - 1
    assert main([*argv[:second], "--eagle_heads", str(tmp_path / "draft"), *argv[second + 2 :]]) == 2
    assert "one head of a name" in capsys.readouterr().err
    assert main([*argv[:second], "--eagle_heads", str(tmp_path / "eagle"), *argv[second + 2 :]]) == 0
    by_its_old_name = from_json(json.loads(kept.read_text()))
    assert {figure.name: figure for figure in by_its_old_name} == figures
    # One drafter alone, from what was recorded with both.
    del argv[argv.index(models["eagle"]) - 1 : argv.index(models["eagle"]) + 1]
    assert main(argv) == 2
    assert "for what eagle drafts, which is not given" in capsys.readouterr().err
    del argv[argv.index(str(tmp_path / "eagle")) - 1 : argv.index(str(tmp_path / "eagle")) + 1]
    assert main(argv) == 0
    again = {figure.name: figure for figure in from_json(json.loads(kept.read_text()))}
    assert again["policies-gains-draft-t1"] == figures["policies-gains-draft-t1"]
    assert not any("eagle" in name for name in again)


def test_the_command_on_prompts_without_splits(models, tmp_path, capsys):
    prompts = some_prompts(tmp_path / "plain.jsonl", 4)
    argv = ["eval", "policies", "--target", models["target"], "--draft", models["draft"], "--prompts", prompts]
    argv += ["--split", "none", "--temperatures", "0", "--max_drafted", "3", "--max_new_tokens", "6", "--cs", "0.2"]
    argv += ["--hs", "0.5", "--ts", "0.5", "--bench_limit", "0", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "chosen on 1 prompts of the last 1; the first 3 are reported" in said
    assert "no table of overlaps" in said
    figures = from_json(json.loads((tmp_path / "out" / "results.json").read_text()))
    assert "policies-overlap" not in {figure.name for figure in figures}
