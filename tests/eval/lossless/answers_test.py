"""`eval certify` on answers of the decoder itself, which stands for a server: honest, and with planted mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planted_biases import accepts_too_often
from quick_heads import captured_head

from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as answer
from draftsmith.eval.lossless.answers import CertifyConfig, run
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import RowAnswer
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm


@pytest.fixture(scope="module")
def prompts(models, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("asked")
    rows = [{"id": f"q{i}", "prompt": f"Question {i}: what is {i} + {i}?"} for i in range(160)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_prompts(
        PromptsConfig(source=str(root / "rows.jsonl"), target=models["target"], output=root / "prompts")
    )


def answers(models, prompts: Path, output: Path, draft: bool = True, **changes: Any) -> Path:
    options: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True, "batch_size": 32, "seed": 1, **changes}
    options |= {"draft": models["draft"]} if draft else {}
    return answer(ResponsesConfig(prompts=prompts, target=models["target"], output=output, **options))


@pytest.fixture(scope="module")
def control(models, prompts, tmp_path_factory) -> Path:
    return answers(models, prompts, tmp_path_factory.mktemp("control") / "plain", draft=False, seed=2)


def certified(models, tmp_path, served: Path, control: Path | None, **changes: Any) -> tuple[int, list[dict]]:
    config = CertifyConfig(
        target=models["target"], answers=served, control=control, output=tmp_path / "certificate", **changes
    )
    return run(config), json.loads((tmp_path / "certificate" / "certificate.json").read_text())["answers"]


def test_an_honest_server_passes_and_one_that_accepts_too_often_fails(models, prompts, control, tmp_path, monkeypatch):
    honest = answers(models, prompts, tmp_path / "honest")
    accepts_too_often(monkeypatch)
    mistaken = answers(models, prompts, tmp_path / "mistaken")
    for served, ttt_steps in ((honest, True), (mistaken, False)):
        code, (plain, server) = certified(models, tmp_path, served, control, draft=models["draft"])
        assert plain["passed"] and plain["tokens"] == server["tokens"] == 160 * 64
        assert (code, server["passed"]) == (1 - ttt_steps, ttt_steps)
    assert server["strongest_bet"].startswith("towards")
    assert 0 < server["detectable"]["what was drafted"] < 0.1


def test_the_drafter_may_read_states_of_inner_layers(models, control, tmp_path):
    target = load_lm(models["target"])
    path = save_head(tmp_path / "head", captured_head(target).float(), {"target": target.info.identity}, "card")
    code, (server,) = certified(models, tmp_path, control, None, draft=str(path), limit=16)
    assert code == 0 and server["detectable"]["the draft's first choice"] > 0


def test_greedy_answers_are_the_targets_first_choices(models, prompts, tmp_path, monkeypatch):
    greedy = answers(models, prompts, tmp_path / "greedy", temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, greedy, None)
    assert code == 0 and server["largest_gap"] < 1e-3
    emit = RowAnswer.emit
    monkeypatch.setattr(RowAnswer, "emit", lambda self, tokens: emit(self, [*tokens[:-1], (tokens[-1] + 1) % 60]))
    wrong = answers(models, prompts, tmp_path / "wrong", draft=False, temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, wrong, None)
    assert code == 1 and server["first_difference"]["id"] == "q0" and server["largest_gap"] > server["allowed"]


def test_answers_that_were_asked_for_otherwise_are_refused(models, prompts, control, tmp_path, capsys):
    greedy = answers(models, prompts, tmp_path / "greedy", draft=False, temperature=0.0)
    words = ["eval", "certify", "--target", models["target"], "--answers", str(greedy), "--control", str(control)]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "control" in capsys.readouterr().err
