"""`eval certify`: what follows the target passes, and what is planted is found: in the decoder's own loops, and in
answers of the decoder that stands for a server."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_biases import PLANTED, Planted, accepts_too_often, child_twice, past_the_end
from states_server import StatesServer
from worlds import captured_head, draft_options, draft_words

from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as answer
from draftsmith.eval import certify
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bets import DraftedPlace, RecordingRunner, decided_tokens, ends_as_asked
from draftsmith.eval.certify import Answered, CertifyConfig, greedy_answers, greedy_test, methods_rows, run
from draftsmith.launch.cli import main
from draftsmith.modules.decoding import verify
from draftsmith.modules.decoding.drafter import EachRow
from draftsmith.modules.decoding.loop import RowAnswer
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.methods import known_methods, parse_methods
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import InputError, SamplingParams

FLAGS = {
    "split": "test",
    "limit": 3,
    "max_new_tokens": 16,
    "sampled_tokens": 500,
    "batch_size": 4,
}


def config(models, output: Path, **changes) -> CertifyConfig:
    return CertifyConfig(**draft_options(models), output=output, **{**FLAGS, **changes})


def rows(output: Path) -> dict[str, dict]:
    """Of the result, by `method, loop`."""
    return {row["of"]: row for row in json.loads((output / "results.json").read_text())["answers"]}


def test_lossless_methods_pass_in_both_loops(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    methods = "spec:k=3,eagle-tree:nodes=6:depth=2:topk=3,pld,online:c=0.1:max=4"
    assert run(config(models, tmp_path, methods=methods)) == 0
    found = rows(tmp_path)
    assert set(found) == {f"{label}, {loop}" for label in methods.split(",") for loop in ("single", "batched")}
    for row in found.values():
        assert row["passed"] and row["greedy"]["identical"] == 3 and 3 < row["greedy"]["tokens"] <= 48
        test = row["sampling"]
        assert test["impossible"] == test["wrong_ends"] == 0 and test["p_value"] > test["level"]
        assert test["level"] == pytest.approx(1e-3 / 8) and test["tokens"] >= 500
    out = capsys.readouterr().out
    assert out.count("follows the target") == 8
    # A passing method is shown with what would have been found.
    shown = re.findall(r"^ *what was drafted +(\S+, \w+) +[+-]0\.\d+ +(0\.\d+)", out, re.MULTILINE)
    assert shown == [(name, f"{row['sampling']['detectable']['what was drafted']:.4f}") for name, row in found.items()]


@pytest.fixture(scope="module")
def loaded(models) -> tuple[Models, list[BenchPrompt]]:
    target, draft = load_lm(models["target"]), load_lm(models["draft"])
    prompts = [BenchPrompt(str(i), list(range(5 + i, 15 + 2 * i))) for i in range(2)]
    return Models(target, draft, capacity=200), prompts


def asked(output: Path, **settings) -> CertifyConfig:
    return CertifyConfig(target="", prompts="", output=output, **settings)


def planted_row(loaded, planted: Planted, tmp_path: Path, monkeypatch, **changes) -> dict:
    """The result of the planted method's loop."""
    lms, prompts = loaded
    planted.plant(monkeypatch)
    size = 1 if planted.loop == "single" else FLAGS["batch_size"]
    settings = {**FLAGS, "sampled_tokens": 30_000, "ignore_eos": True, "batch_size": size, **changes}
    return methods_rows(asked(tmp_path, **settings), parse_methods(planted.method), lms, prompts, lms.target)[-1]


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_the_real_loops_is_found(name, loaded, tmp_path, monkeypatch):
    row = planted_row(loaded, PLANTED[name], tmp_path, monkeypatch)
    assert row["greedy"]["passed"] and not row["sampling"]["passed"] and not row["passed"]


@dataclass(frozen=True)
class FirstTokens(Method):
    """Drafts a tree of all that the vocabulary begins with, as siblings."""

    def build(self, models, rows=1):
        return EachRow([self] * rows)

    def start(self, prompt, features, first_token):
        pass

    def propose(self, max_drafted, sampler):
        return DraftTree(tuple(range(60)), (-1,) * 60)

    def advance(self, outcome):
        pass


def test_a_second_draw_at_a_trees_nodes_is_found(loaded, tmp_path, monkeypatch):
    monkeypatch.setitem(known_methods(), "first", FirstTokens())
    row = planted_row(loaded, Planted(child_twice, "first"), tmp_path, monkeypatch)
    assert row["sampling"]["strongest_bet"] == "towards what was drafted" and not row["sampling"]["passed"]


def test_an_end_token_that_does_not_end_is_found(models, loaded, tmp_path, monkeypatch):
    lms, prompts = loaded
    common = greedy(lms, prompts, tmp_path)[0].tokens[5]
    ending = (replace(lms, ends=(common,)), prompts)
    row = planted_row(ending, Planted(past_the_end), tmp_path, monkeypatch)
    assert not row["passed"] and row["sampling"]["wrong_ends"] > 0


def greedy(lms: Models, prompts: list[BenchPrompt], output: Path) -> list[Answered]:
    return greedy_answers(RecordingRunner(None, replace(lms, ends=())), prompts, asked(output, **FLAGS))


def test_a_biased_sampler_fails_with_exit_code_1_and_the_result_says_by_what(models, tmp_path, monkeypatch):
    PLANTED["replaced from p"].plant(monkeypatch)
    flags = draft_words({**models, **FLAGS})
    assert main(["eval", "certify", *flags, "--methods", "spec:k=3", "--output", str(tmp_path)]) == 1
    row = rows(tmp_path)["spec:k=3, single"]
    assert row["greedy"]["passed"] and not row["sampling"]["passed"]
    assert row["sampling"]["strongest_bet"] and row["sampling"]["p_value"] < row["sampling"]["level"]
    assert not rows(tmp_path)["spec:k=3, batched"]["passed"]  # there is one loop


def test_a_token_that_the_target_cannot_emit_is_found_at_once(loaded, tmp_path, monkeypatch):
    def all_of_them(patch) -> None:
        patch.setattr(verify, "probabilities", lambda logits, params: probabilities(logits, SamplingParams(1.0)))

    row = planted_row(loaded, Planted(all_of_them), tmp_path, monkeypatch, top_k=3)
    assert row["sampling"]["impossible"] > 0 and row["sampling"]["p_value"] == 0 and not row["passed"]


def test_the_batched_loops_greedy_answers_are_tested_too(models, tmp_path, monkeypatch):
    def changed(runner, *more):
        answers = greedy_answers(runner, *more)
        if runner.rows > 1:
            answers[1].tokens[-1] += 1
        return answers

    monkeypatch.setattr(certify, "greedy_answers", changed)
    assert run(config(models, tmp_path, sampled_tokens=0, methods="spec:k=3")) == 1
    found = rows(tmp_path)
    assert found["spec:k=3, single"]["passed"] and not found["spec:k=3, batched"]["passed"]
    assert found["spec:k=3, batched"]["greedy"]["identical"] == 2
    assert found["spec:k=3, batched"]["greedy"]["first_difference"]["id"] == "row-1"


def test_another_dtype_is_compared_by_the_gap_to_the_best_logit(models, tmp_path):
    assert run(config(models, tmp_path, methods="spec:k=3", dtype="bfloat16", sampled_tokens=0)) == 0
    for row in rows(tmp_path).values():
        assert 0 <= row["greedy"]["largest_gap"] <= 0.5


@pytest.mark.parametrize("cut", [lambda tokens: [], lambda tokens: tokens[:-1], lambda tokens: tokens * 2])
def test_a_truncated_empty_or_overlong_answer_fails_whatever_its_gaps(cut, loaded, tmp_path):
    """A gap looks at the tokens that are there: lengths are held against the rule, too."""
    lms, prompts = replace(loaded[0], ends=()), [BenchPrompt("0", [5, 6, 7])]
    runner, (whole,) = RecordingRunner(None, lms), greedy(lms, prompts, tmp_path)
    assert greedy_test(lms.target, [whole], 1e9)["passed"]
    short = certify.answered(runner, prompts[0], cut(whole.tokens), asked(tmp_path, **FLAGS))
    found = greedy_test(lms.target, [short], 1e9)
    assert not found["passed"] and found["wrong_ends"] == 1


def test_answers_end_with_the_first_end_token_or_at_the_limit():
    ends = (4,)
    assert ends_as_asked([1, 4], ends, 5) and ends_as_asked([1, 2, 3], ends, 3) and ends_as_asked([1, 2, 4], ends, 3)
    for wrong in ([], [1, 2], [4, 1, 2], [1, 2, 3, 1], [4, 4]):
        assert not ends_as_asked(wrong, ends, 3)
    assert ends_as_asked([4, 4, 4], (), 3)


def test_models_that_only_transformers_runs_have_the_single_loop(models, tmp_path):
    assert run(config(models, tmp_path, methods="spec:k=3", engine="hf", sampled_tokens=0, limit=1)) == 0
    assert set(rows(tmp_path)) == {"spec:k=3, single"}


# -- answers of a server


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
    return run(config), json.loads((tmp_path / "certificate" / "results.json").read_text())["answers"]


def test_an_honest_server_passes_and_one_that_accepts_too_often_fails(models, prompts, control, tmp_path, monkeypatch):
    honest = answers(models, prompts, tmp_path / "honest")
    accepts_too_often(monkeypatch)
    mistaken = answers(models, prompts, tmp_path / "mistaken")
    for served, ttt_steps in ((honest, True), (mistaken, False)):
        code, (plain, server) = certified(models, tmp_path, served, control, draft=models["draft"])
        plain_test, test = plain["sampling"], server["sampling"]
        assert plain["passed"] and plain_test["tokens"] == test["tokens"] == 160 * 64
        assert (code, server["passed"]) == (1 - ttt_steps, ttt_steps)
    assert test["strongest_bet"].startswith("towards")
    assert 0 < test["detectable"]["what was drafted"] < 0.1


def test_a_server_that_scores_answers_by_its_log_probabilities_finds_the_mistake_too(
    models, prompts, control, tmp_path, monkeypatch
):
    honest = answers(models, prompts, tmp_path / "honest")
    accepts_too_often(monkeypatch)
    mistaken = answers(models, prompts, tmp_path / "mistaken")
    lm = load_lm(models["target"])
    with StatesServer(lm, (), tmp_path / "states", connector=False) as server:
        for served, passes in ((honest, True), (mistaken, False)):
            more = {"draft": models["draft"], "target_server": server.url}
            code, (plain, tested) = certified(models, tmp_path, served, control, **more)
            assert plain["passed"] and tested["passed"] == passes == (code == 0)
            assert tested["sampling"]["tokens"] == 160 * 64 and not tested["sampling"]["impossible"]
        # A head reads states, which this server does not have.
        save_head(tmp_path / "head", captured_head(lm), {"target": lm.info.identity}, "card")
        with pytest.raises(InputError, match="without our connector"):
            certified(models, tmp_path, mistaken, control, **{**more, "draft": str(tmp_path / "head")})


@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.9}, {}])
def test_log_probabilities_of_a_server_give_what_the_target_gives(models, tmp_path, cut, capsys):
    """In every mode of sampling: all probabilities where they are known, and the mass of the others."""
    lm, params = load_lm(models["target"]), SamplingParams(**{"temperature": 1.0, **cut})
    prompt, own = [5, 6, 7], [DraftedPlace()] * 4
    (answer,) = generate_all(lm, [prompt], SamplingParams(), 4, 1, eos_ids=())
    expected, _ = decided_tokens(lm, prompt, answer, own, (), params, 0.5)
    with StatesServer(lm, (), tmp_path / "states", connector=False, max_logprobs=20) as server:
        served = load_target(models["target"], server.url, dtype="float32", device="cpu")
        found, impossible = decided_tokens(served, prompt, answer, own, (), params, 0.5)
    assert len(found.token) == len(expected.token) == 4 and not impossible
    # All are asked for where the likeliest do not suffice.
    assert ("20 are asked for" in capsys.readouterr().err) == (cut == {} or "top_k" in cut)
    top = expected.target.topk(5).indices
    torch.testing.assert_close(found.target.gather(1, top), expected.target.gather(1, top), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.target.sum(-1), torch.ones(len(found.token), dtype=torch.float64))


def test_the_drafter_may_read_states_of_inner_layers(models, control, tmp_path):
    target = load_lm(models["target"])
    path = save_head(tmp_path / "head", captured_head(target).float(), {"target": target.info.identity}, "card")
    code, (server,) = certified(models, tmp_path, control, None, draft=str(path), limit=16)
    assert code == 0 and server["sampling"]["detectable"]["the draft's first choice"] > 0


def test_greedy_answers_are_the_targets_first_choices(models, prompts, tmp_path, monkeypatch):
    greedy = answers(models, prompts, tmp_path / "greedy", temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, greedy, None)
    assert code == 0 and server["greedy"]["largest_gap"] < 1e-3
    emit = RowAnswer.emit
    monkeypatch.setattr(RowAnswer, "emit", lambda self, tokens: emit(self, [*tokens[:-1], (tokens[-1] + 1) % 60]))
    wrong = answers(models, prompts, tmp_path / "wrong", draft=False, temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, wrong, None)
    test = server["greedy"]
    assert code == 1 and test["first_difference"]["id"] == "q0" and test["largest_gap"] > test["allowed"]


def test_answers_that_were_asked_for_otherwise_are_refused(models, prompts, control, tmp_path, capsys):
    greedy = answers(models, prompts, tmp_path / "greedy", draft=False, temperature=0.0)
    words = ["eval", "certify", "--target", models["target"], "--answers", str(greedy), "--control", str(control)]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "control" in capsys.readouterr().err
