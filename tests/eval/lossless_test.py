"""The certificate: it passes what is lossless, catches what is not, and its statistics are the textbook's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.eval import lossless
from draftsmith.eval.lossless import LosslessConfig, chi_square
from draftsmith.eval.methods import chains
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.decoding.protocols import DraftTree

FLAGS = {"split": "test", "limit": 3, "max_new_tokens": 12, "samples": 150, "sampled_prompts": 1, "top_k": 3}


def config(models, output: Path, **changes) -> LosslessConfig:
    return LosslessConfig(**models, output=output, **{**FLAGS, **changes})


def verdicts(output: Path) -> list[dict]:
    return json.loads((output / "lossless.json").read_text())["methods"]


def test_lossless_methods_pass(models, tmp_path, capsys):
    methods = "spec:k=3,specdec++:h=0.7:min=1:max=5,eagle:k=2,eagle2:nodes=6:depth=2:topk=3,pearl:k=2"
    assert lossless.run(config(models, tmp_path, methods=methods)) == 0
    rows = verdicts(tmp_path)
    assert [row["method"] for row in rows] == methods.split(",")
    for row in rows:
        assert row["passed"] and row["greedy"]["identical"] == 3 and 3 < row["greedy"]["tokens"] <= 36
        assert all(test["impossible"] == 0 and 0 <= test["pair_p"] <= 1 for test in row["sampling"])
    assert capsys.readouterr().out.count("lossless") >= 5


def test_another_dtype_is_judged_by_the_gap_to_the_best_logit(models, tmp_path):
    assert lossless.run(config(models, tmp_path, methods="spec:k=3", dtype="bfloat16", sampled_prompts=0)) == 0
    (row,) = verdicts(tmp_path)
    assert 0 <= row["greedy"]["largest_logit_gap"] <= 0.5
    assert lossless.run(config(models, tmp_path, dtype="bfloat16", sampled_prompts=0, max_gap=-1.0)) == 1


class AcceptsAll(DraftModelDrafter):
    """Wrong: claims to have drawn from a law under which its most probable token is never rejected."""

    def propose(self, max_drafted, params, source):
        tree = super().propose(max_drafted, params, source)
        if tree.draft_prob is None:
            return tree
        return DraftTree(tree.tokens, tree.parents, tree.draft_prob * 1e-6)


def test_a_biased_sampler_fails_with_exit_code_1(models, tmp_path, monkeypatch):
    monkeypatch.setattr(
        chains, "build_chain", lambda models, drafter, stop: AcceptsAll(models.draft, stop, models.capacity)
    )
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**models, **FLAGS, "samples": 400}.items()]
    assert main(["eval", "lossless", *flags, "--methods", "spec:k=3", "--output", str(tmp_path)]) == 1
    (row,) = verdicts(tmp_path)
    assert row["greedy"]["passed"] and not row["sampling"][0]["passed"]


def test_a_changed_greedy_answer_is_named(models, tmp_path, monkeypatch):
    original = lossless.EngineRunner.__call__

    answers = []

    def changed(self, prompt, max_new_tokens, seed):
        made = original(self, prompt, max_new_tokens, seed)
        answers.append(list(made.tokens))
        if self.drafter is not None and self.params.greedy:
            made.tokens[-1] += 1
        return made

    monkeypatch.setattr(lossless.EngineRunner, "__call__", changed)
    assert lossless.run(config(models, tmp_path, sampled_prompts=0)) == 1
    (row,) = verdicts(tmp_path)
    assert row["greedy"]["identical"] == 0
    assert row["greedy"]["first_difference"]["place"] in (len(answer) - 1 for answer in answers)


def test_chi_square_is_the_textbooks():
    fair = {"heads": 0.5, "tails": 0.5}
    assert chi_square({"heads": 50, "tails": 50}, fair, 100) == 1
    # statistic 4 on 1 degree of freedom: P = erfc(sqrt(2)).
    expected = float(torch.special.erfc(torch.tensor(2.0, dtype=torch.float64).sqrt()))
    assert chi_square({"heads": 60, "tails": 40}, fair, 100) == pytest.approx(expected, abs=1e-12)
    # Cells of fewer than five expected counts are one cell, and 2 degrees of freedom have P = exp(-x / 2).
    law = {"a": 0.5, "b": 0.4, **{i: 0.01 for i in range(10)}}
    counts = {"a": 55, "b": 37, **{i: 1 for i in range(8)}}
    statistic = 25 / 50 + 9 / 40 + 4 / 10
    expected = float(torch.exp(torch.tensor(-statistic / 2, dtype=torch.float64)))
    assert chi_square(counts, law, 100) == pytest.approx(expected, abs=1e-12)


def test_transformers_own_methods_and_greedy_settings_are_refused(models, tmp_path, capsys):
    flags = [f"--{key}={value}" for key, value in models.items()] + [f"--output={tmp_path}"]
    assert main(["eval", "lossless", *flags, "--methods", "hf"]) == 2
    assert main(["eval", "lossless", *flags, "--temperature", "0"]) == 2
    said = capsys.readouterr().err
    assert "hf" in said and "temperature" in said
