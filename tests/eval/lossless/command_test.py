"""The certificate: it passes what is lossless, and finds what is planted in either of the decoder's real loops."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from planted_biases import PLANTED, Planted, child_twice, past_the_end
from tiny_world import draft_options, draft_words

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.lossless import command
from draftsmith.eval.lossless.command import LosslessConfig, certify, greedy_answers, greedy_test, run
from draftsmith.eval.lossless.sampling import RecordingRunner, ends_as_asked
from draftsmith.launch.cli import main
from draftsmith.modules.decoding import verify
from draftsmith.modules.decoding.drafter import EachRow
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.methods import known_methods, parse_methods
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

FLAGS = {
    "split": "test",
    "limit": 3,
    "max_new_tokens": 16,
    "sampled_tokens": 500,
    "batch_size": 4,
}


def config(models, output: Path, **changes) -> LosslessConfig:
    return LosslessConfig(**draft_options(models), output=output, **{**FLAGS, **changes})


def rows(output: Path) -> dict[str, dict]:
    """Of the result, by `method, loop`."""
    found = json.loads((output / "lossless.json").read_text())["methods"]
    return {f"{method['method']}, {row['loop']}": row for method in found for row in method["loops"]}


def test_lossless_methods_pass_in_both_loops(models, tmp_path, capsys):
    methods = "spec:k=3,eagle-tree:nodes=6:depth=2:topk=3,pearl:k=2,online:c=0.1:max=4"
    assert run(config(models, tmp_path, methods=methods)) == 0
    found = rows(tmp_path)
    assert set(found) == {f"{label}, {loop}" for label in methods.split(",") for loop in ("single", "batched")}
    for row in found.values():
        assert row["passed"] and row["greedy"]["identical"] == 3 and 3 < row["greedy"]["tokens"] <= 48
        test = row["sampling"]
        assert test["impossible"] == test["wrong_ends"] == 0 and test["p_value"] > test["level"]
        assert test["level"] == pytest.approx(1e-3 / 8) and test["tokens"] >= 500
    assert capsys.readouterr().out.count("lossless") >= 6


@pytest.fixture(scope="module")
def loaded(models) -> tuple[Models, list[BenchPrompt]]:
    target, draft = load_lm(models["target"]), load_lm(models["draft"])
    prompts = [BenchPrompt(str(i), list(range(5 + i, 15 + 2 * i))) for i in range(2)]
    return Models(target, draft, capacity=200), prompts


def planted_row(loaded, planted: Planted, tmp_path: Path, monkeypatch, **changes) -> dict:
    """The result of the planted method's loop."""
    lms, prompts = loaded
    planted.plant(monkeypatch)
    size = 1 if planted.loop == "single" else FLAGS["batch_size"]
    settings = {**FLAGS, "sampled_tokens": 30_000, "ignore_eos": True, "batch_size": size, **changes}
    settings = LosslessConfig("", "", tmp_path, **settings)
    (method,) = certify(settings, parse_methods(planted.method), lms, prompts, None)
    return method["loops"][-1]


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
    common = greedy(lms, prompts, tmp_path)[0][5]
    ending = (replace(lms, ends=(common,)), prompts)
    row = planted_row(ending, Planted(past_the_end), tmp_path, monkeypatch)
    assert not row["passed"] and row["sampling"]["wrong_ends"] > 0


def greedy(lms: Models, prompts: list[BenchPrompt], output: Path) -> list[list[int]]:
    return greedy_answers(
        RecordingRunner(None, replace(lms, ends=())), prompts, LosslessConfig("", "", output, **FLAGS)
    )


def test_a_biased_sampler_fails_with_exit_code_1_and_the_result_says_by_what(models, tmp_path, monkeypatch):
    PLANTED["replaced from p"].plant(monkeypatch)
    flags = draft_words({**models, **FLAGS})
    assert main(["eval", "lossless", *flags, "--methods", "spec:k=3", "--output", str(tmp_path)]) == 1
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
            answers[1][-1] += 1
        return answers

    monkeypatch.setattr(command, "greedy_answers", changed)
    assert run(config(models, tmp_path, sampled_tokens=0, methods="spec:k=3")) == 1
    found = rows(tmp_path)
    assert found["spec:k=3, single"]["passed"] and not found["spec:k=3, batched"]["passed"]
    assert found["spec:k=3, batched"]["greedy"]["identical"] == 2
    assert found["spec:k=3, batched"]["greedy"]["first_difference"]["prompt"] == "row-1"


def test_another_dtype_is_compared_by_the_gap_to_the_best_logit(models, tmp_path):
    assert run(config(models, tmp_path, methods="spec:k=3", dtype="bfloat16", sampled_tokens=0)) == 0
    for row in rows(tmp_path).values():
        assert 0 <= row["greedy"]["largest_logit_gap"] <= 0.5


@pytest.mark.parametrize("cut", [lambda tokens: [], lambda tokens: tokens[:-1], lambda tokens: tokens * 2])
def test_a_truncated_empty_or_overlong_answer_fails_outside_float32(cut, loaded, tmp_path, monkeypatch):
    """A gap looks at the tokens that are there: lengths are held against the rule, too."""
    lms, prompts = replace(loaded[0], ends=()), [BenchPrompt("0", [5, 6, 7])]
    expected = greedy(lms, prompts, tmp_path)
    monkeypatch.setattr(command, "MAX_GAP", 1e9)
    settings = LosslessConfig("", "", tmp_path, **FLAGS)

    def tested(answers) -> dict:
        return greedy_test(answers, expected, prompts, lms, settings, lms.target)

    assert tested(expected)["passed"]
    found = tested([cut(expected[0])])
    assert not found["passed"] and not found["ended_as_asked"] and found["first_difference"]["prompt"] == "0"


def test_answers_end_with_the_first_end_token_or_at_the_limit():
    ends = (4,)
    assert ends_as_asked([1, 4], ends, 5) and ends_as_asked([1, 2, 3], ends, 3) and ends_as_asked([1, 2, 4], ends, 3)
    for wrong in ([], [1, 2], [4, 1, 2], [1, 2, 3, 1], [4, 4]):
        assert not ends_as_asked(wrong, ends, 3)
    assert ends_as_asked([4, 4, 4], (), 3)


def test_models_that_only_transformers_runs_have_the_single_loop(models, tmp_path):
    assert run(config(models, tmp_path, methods="spec:k=3", engine="hf", sampled_tokens=0, limit=1)) == 0
    assert set(rows(tmp_path)) == {"spec:k=3, single"}


@pytest.mark.parametrize("sampled", [400, 0])
def test_typical_acceptance_is_announced_found_and_never_called_lossless(
    models, tmp_path, capsys, monkeypatch, sampled
):
    """By its rule, also where no test is made that could find it: greedily nothing is changed."""
    monkeypatch.setenv("COLUMNS", "200")
    own = {"target": models["target"], "draft": str(Path(models["eagle"]).with_name("medusa"))}
    settings = {**own, "prompts": models["prompts"], **FLAGS, "sampled_tokens": sampled, "batch_size": 1}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    assert (
        main(["eval", "lossless", *flags, "--methods", "medusa-static:accept=typical", "--output", str(tmp_path)]) == 1
    )
    said = capsys.readouterr()
    assert (
        "medusa-static:accept=typical (not lossless): its rule of acceptance changes the output" in said.out + said.err
    )
    assert "NOT lossless, by its rule" in said.out
    row = rows(tmp_path)["medusa-static:accept=typical (not lossless), single"]
    assert row["greedy"]["passed"] and not row["passed"]
    assert row["sampling"] is None if not sampled else not row["sampling"]["passed"]
