"""Reliability, predictors and the calibration command, against sklearn, sums by hand and a plain walk."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hand_rollouts import hand_rollouts
from quick_heads import varied_acceptance_head
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from draftsmith.data.heads.directory import save_head
from draftsmith.data.models.loading import load_lm
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.studies.calibration import study
from draftsmith.eval.studies.calibration.study import predictions
from draftsmith.eval.studies.predictors import (
    ENTROPY,
    MAX_Q,
    MIN_TOKENS,
    Q,
    labelled_tokens,
    online_probs,
    quality,
    reliability_bins,
)
from draftsmith.launch.cli import main
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.decoding.confidence import MAX_LOGIT, log_odds_of


def agreements(answers: int, length: int, seed: int) -> list[list[bool]]:
    rng = np.random.default_rng(seed)
    return (rng.random((answers, length)) < 0.75).tolist()


def test_bins_by_hand():
    prob = torch.tensor([0.9, 0.1, 0.2, 0.8, 0.7, 0.3])
    label = torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, 0.0])
    bins = reliability_bins(prob, label, num_bins=3)
    expected = [(0.15, 0.25, 2), (0.5, 0.5, 2), (0.85, 0.75, 2)]
    for found, (predicted, observed, count) in zip(bins, expected, strict=True):
        assert found == pytest.approx({"predicted": predicted, "observed": observed, "count": count}, abs=1e-6)


def test_fewer_tokens_than_bins_make_fewer_bins():
    assert [found["count"] for found in reliability_bins(torch.tensor([0.4, 0.6]), torch.tensor([0.0, 1.0]))] == [1, 1]


def test_quality_on_hard_labels_is_sklearns():
    rng = np.random.default_rng(0)
    prob, label = rng.uniform(0.02, 0.98, 500).round(2), (rng.random(500) < 0.6).astype(float)
    found = quality(torch.from_numpy(prob), torch.from_numpy(prob), torch.from_numpy(label))
    assert found["auc"] == pytest.approx(roc_auc_score(label, prob))
    assert found["brier"] == pytest.approx(brier_score_loss(label, prob))
    assert found["kl"] == pytest.approx(log_loss(label, prob))
    bins = reliability_bins(torch.from_numpy(prob), torch.from_numpy(label))
    gaps = sum(abs(item["predicted"] - item["observed"]) * item["count"] for item in bins)
    assert found["ece"] == pytest.approx(gaps / 500)


def test_little_and_one_sided_data_give_no_numbers():
    score = torch.rand(MIN_TOKENS - 1)
    assert quality(score, score, score)["auc"] is None
    ones = torch.ones(MIN_TOKENS)
    found = quality(ones / 2, None, ones)
    assert found["auc"] is None and found["brier"] is None and found["tokens"] == MIN_TOKENS


def test_labelled_tokens_are_those_down_to_the_first_rejection():
    rollouts = hand_rollouts([[True, True, False, True], [True, False]], depth=3)
    labelled = labelled_tokens(rollouts)
    # Rounds begin at tokens 1, 2, 3 of the first answer and at 1 of the second.
    assert labelled.accept_prob.tolist() == [1, 0, 0, 1, 0]
    assert labelled.depth.tolist() == [1, 2, 1, 1, 1]
    assert labelled.task.tolist() == ["even"] * 4 + ["odd"]


def test_the_online_fit_learns_only_from_rounds_that_would_be_run():
    agreed = agreements(answers=4, length=30, seed=1)
    depth = 4
    rollouts = hand_rollouts(agreed, depth)
    features = log_odds_of(torch.from_numpy(rollouts.log_max_q)).numpy()
    model, expected, row = OnlineLogistic(), np.zeros_like(features), 0
    for own in agreed:
        start = 1
        for position in range(1, len(own)):
            expected[row] = [model.prob([x]) for x in features[row]]
            if position == start:
                drafted = own[start : start + depth]
                kept = drafted.index(False) if False in drafted else len(drafted)
                for x, label in zip(features[row], drafted[: kept + 1], strict=False):
                    model.update([x], float(label))
                start += kept + 1
            row += 1
    np.testing.assert_array_equal(online_probs(rollouts), expected)


def test_log_odds_of_a_log_probability():
    prob = torch.tensor([0.1, 0.5, 0.999], dtype=torch.float64)
    torch.testing.assert_close(log_odds_of(prob.log()), torch.logit(prob))
    assert log_odds_of(torch.zeros(1)).item() == MAX_LOGIT and math.isnan(log_odds_of(torch.tensor([math.nan])))


def test_what_each_predictor_says():
    labelled, fit = (labelled_tokens(hand_rollouts(agreements(12, 40, seed), 4, seed)) for seed in (2, 3))
    head = AcceptanceHead(AcceptanceHeadConfig(8, w_rej=6.0, calibration=(0.5, 0.25)))
    said = predictions(labelled, fit, head)
    raw = labelled.of(labelled.rollouts.heads["head"])
    torch.testing.assert_close(said[study.RAW].prob, torch.sigmoid(raw))
    torch.testing.assert_close(said[study.CORRECTED].prob, torch.sigmoid(raw + math.log(6)))
    torch.testing.assert_close(said[study.CALIBRATED].prob, torch.sigmoid(0.5 * (raw + math.log(6)) + 0.25))
    torch.testing.assert_close(said[Q].prob, labelled.of(labelled.rollouts.log_q).exp())
    assert said[ENTROPY].prob is None
    # The fit is made on the other prompts; sklearn's has no ridge, ours one of 0.01 tokens.
    fitted = LogisticRegression(C=np.inf).fit(-fit.of(fit.rollouts.entropy).numpy()[:, None], fit.accept_prob.numpy())
    expected = fitted.predict_proba(-labelled.of(labelled.rollouts.entropy).numpy()[:, None])[:, 1]
    np.testing.assert_allclose(said[study.FITTED_ENTROPY].prob.numpy(), expected, atol=1e-3)


@pytest.mark.slow
def test_the_command_on_the_embedded_pair(tmp_path, capsys):
    draft = load_lm("embedded:draft").info
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    head = varied_acceptance_head(draft.hidden_size)
    acceptance = save_head(tmp_path / "head", head, {"target": draft.identity, "sampling": sampling}, "card")
    argv = ["eval", "calibration", "--config", "calibration", "--acceptance", str(acceptance), "--quick", "false"]
    argv += ["--limit", "3", "--fit_limit", "2", "--depth", "3", "--max_new_tokens", "24", "--keep_tasks", "rename"]
    argv += ["--output", str(tmp_path)]
    assert main(argv) == 0
    assert "labels of another mode (temperature 0.0 there, 1.0 here)" in capsys.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["kind"] == "calibration"
    figures = {figure.name: figure for figure in from_json(results)}
    overall = {(row["temperature"], row["predictor"]): row for row in figures["calibration"].rows}
    assert len(overall) == 2 * len(study.WHAT)
    # Greedy, the drafted token is the draft's best: two predictors are one.
    assert overall["T=0", Q]["brier"] == overall["T=0", MAX_Q]["brier"]
    rows = figures["reliability-head"].rows
    for (temperature, name), row in overall.items():
        if name == study.RAW:
            own = [bin for bin in rows if (bin["temperature"], bin["predictor"]) == (temperature, name)]
            assert sum(bin["count"] for bin in own) == row["tokens"]
    before = (tmp_path / "results.json").read_text()
    assert main(argv) == 0  # from the rollouts that are there
    after = json.loads((tmp_path / "results.json").read_text())
    assert after["tables"] == json.loads(before)["tables"]
