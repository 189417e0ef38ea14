"""`eval certify`: what follows the target passes, and what is planted is found. The decoder stands for a server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states_server import StatesServer
from worlds import captured_head, run_models

from draftsmith.data.engines import own
from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as answer
from draftsmith.eval.bets import Evidence, decided_tokens, ends_as_asked
from draftsmith.eval.certify import Answered, CertifyConfig, ServerAnswers, greedy_test, run, sampling_test
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.plain import PromptAnswer
from draftsmith.modules.decoding.verify import _LazyNumbers
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams


def test_a_token_that_the_target_cannot_emit_is_found_at_once(models):
    target, params, evidence = load_lm(models["target"]), SamplingParams(1.0, top_k=3), Evidence()
    (tokens,) = generate_all(target, [[5, 6, 7]], SamplingParams(), 4, 1, eos_ids=())
    for last, impossible in ((tokens[3], 0), ((tokens[3] + 1) % 60, 1)):
        found = sampling_test(target, [Answered("0", [5, 6, 7], [*tokens[:3], last], True)], params, 1e-3, evidence)
        assert found["impossible"] == impossible
    assert found["p_value"] == 0 and not found["passed"]


@pytest.mark.parametrize("cut", [lambda tokens: tokens[:-1], lambda tokens: tokens * 2])
def test_a_truncated_or_overlong_answer_fails_whatever_its_gaps(cut, models):
    """A gap looks at the tokens that are there: lengths are held against the rule, too."""
    target, prompt = load_lm(models["target"]), [5, 6, 7]
    (whole,) = generate_all(target, [prompt], SamplingParams(), 8, 1, eos_ids=())
    for tokens, ends_well in ((whole, True), (cut(whole), False)):
        row = {"id": "0", "input_ids": [*prompt, *tokens], "loss_mask": [False] * 3 + [True] * len(tokens)}
        asked = SimpleNamespace(config={"ignore_eos": True, "max_new_tokens": 8}, sampling=None)
        served = ServerAnswers(asked, SimpleNamespace(iterate=lambda row=row: [row]))
        found = greedy_test(target, served.read(target, None), 1e9)
        assert found["passed"] == ends_well and found["wrong_ends"] == 1 - ends_well


def test_answers_end_with_the_first_end_token_or_at_the_limit():
    ends = (4,)
    assert ends_as_asked([1, 4], ends, 5) and ends_as_asked([1, 2, 3], ends, 3) and ends_as_asked([1, 2, 4], ends, 3)
    for wrong in ([], [1, 2], [4, 1, 2], [1, 2, 3, 1], [4, 4]):
        assert not ends_as_asked(wrong, ends, 3)
    assert ends_as_asked([4, 4, 4], (), 3)


NUM_PROMPTS = 160


@pytest.fixture(scope="module")
def prompts(models, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("asked")
    rows = [{"id": f"q{i}", "prompt": f"Question {i}: what is {i} + {i}?"} for i in range(NUM_PROMPTS)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_prompts(
        PromptsConfig(source=str(root / "rows.jsonl"), target=models["target"], output=root / "prompts")
    )


def drafted_rows(draft: str):
    """`generate_rows` as a server drafts: with a draft model, each answer by itself."""

    def rows(lm, prompts, params, max_new_tokens, batch_size, sources, eos_ids):
        drafter = parse_method("spec:k=5").build(run_models(lm, load_lm(draft), capacity=400))
        for number, prompt in enumerate(prompts):
            yield number, generate_one(lm, drafter, prompt, params, max_new_tokens, sources(number), eos_ids).tokens

    return rows


def answers(models, prompts: Path, output: Path, draft: bool = True, **changes: Any) -> Path:
    options: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True, "batch_size": 32, "seed": 1, **changes}
    with pytest.MonkeyPatch.context() as patch:
        if draft:
            patch.setattr(own, "generate_rows", drafted_rows(models["draft"]))
        return answer(ResponsesConfig(data=prompts, target=models["target"], output=output, **options))


@pytest.fixture(scope="module")
def control(models, prompts, tmp_path_factory) -> Path:
    return answers(models, prompts, tmp_path_factory.mktemp("control") / "plain", draft=False, seed=2)


@pytest.fixture(scope="module")
def honest(models, prompts, tmp_path_factory) -> Path:
    return answers(models, prompts, tmp_path_factory.mktemp("honest") / "answers")


@pytest.fixture(scope="module")
def mistaken(models, prompts, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        odds = _LazyNumbers.odds
        patch.setattr(_LazyNumbers, "odds", lambda *arguments: 1.6 * odds(*arguments))
        return answers(models, prompts, tmp_path_factory.mktemp("mistaken") / "answers")


def certified(models, tmp_path, served: Path, control: Path | None, **changes: Any) -> tuple[int, list[dict]]:
    config = CertifyConfig(
        target=models["target"], data=served, control=control, output=tmp_path / "certificate", **changes
    )
    return run(config), json.loads((tmp_path / "certificate" / "results.json").read_text())["answers"]


def test_an_honest_server_passes_and_one_that_accepts_too_often_fails(models, honest, mistaken, control, tmp_path):
    for served, ttt_steps in ((honest, True), (mistaken, False)):
        code, (plain, server) = certified(models, tmp_path, served, control, head=models["draft"])
        plain_test, test = plain["sampling"], server["sampling"]
        assert plain["passed"] and plain_test["tokens"] == test["tokens"] == NUM_PROMPTS * 64
        assert (code, server["passed"]) == (1 - ttt_steps, ttt_steps)
    assert test["strongest_bet"].startswith("towards")
    assert 0 < test["detectable"]["what was drafted"] < 0.1


def test_a_server_that_scores_answers_by_its_log_probabilities_finds_the_mistake_too(models, mistaken, tmp_path):
    """Few answers: a server tells the probabilities of a whole vocabulary for every token."""
    lm = load_lm(models["target"])
    with StatesServer(lm, (), tmp_path / "states", connector=False) as server:
        more = {"head": models["draft"], "server": server.url, "limit": 60}
        code, (tested,) = certified(models, tmp_path, mistaken, None, **more)
        assert not tested["passed"] and code == 1
        assert tested["sampling"]["tokens"] == 60 * 64 and not tested["sampling"]["impossible"]
        # A head reads states, which this server does not have.
        save_head(tmp_path / "head", captured_head(lm), {"target": lm.info.identity}, "card")
        with pytest.raises(InputError, match="without our connector"):
            certified(models, tmp_path, mistaken, None, **{**more, "head": str(tmp_path / "head")})


@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.9}, {}])
def test_log_probabilities_of_a_server_give_what_the_target_gives(models, tmp_path, cut, capsys):
    """In every mode of sampling: all probabilities where they are known, and the mass of the others."""
    lm, params = load_lm(models["target"]), SamplingParams(**{"temperature": 1.0, **cut})
    prompt = [5, 6, 7]
    (answer,) = generate_all(lm, [prompt], SamplingParams(), 4, 1, eos_ids=())
    expected, _ = decided_tokens(lm, prompt, answer, params, 0.5)
    with StatesServer(lm, (), tmp_path / "states", connector=False, max_logprobs=20) as server:
        served = load_target(models["target"], server.url, dtype="float32", device="cpu")
        found, impossible = decided_tokens(served, prompt, answer, params, 0.5)
        server.model = "another"
        with pytest.raises(InputError, match="server_model: found a reply by 'another', expected 'served'"):
            decided_tokens(served, [*prompt, 8], answer, params, 0.5)
    assert len(found.token) == len(expected.token) == 4 and not impossible
    # All are asked for where the likeliest do not suffice.
    assert ("20 are asked for" in capsys.readouterr().err) == (cut == {} or "top_k" in cut)
    top = expected.target.topk(5).indices
    torch.testing.assert_close(found.target.gather(1, top), expected.target.gather(1, top), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.target.sum(-1), torch.ones(len(found.token), dtype=torch.float64))


def test_the_drafter_may_read_states_of_inner_layers(models, control, tmp_path):
    target = load_lm(models["target"])
    path = save_head(tmp_path / "head", captured_head(target).float(), {"target": target.info.identity}, "card")
    code, (server,) = certified(models, tmp_path, control, None, head=str(path), limit=16)
    assert code == 0 and server["sampling"]["detectable"]["the draft's first choice"] > 0


def test_greedy_answers_are_the_targets_first_choices(models, prompts, tmp_path, monkeypatch):
    greedy = answers(models, prompts, tmp_path / "greedy", temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, greedy, None)
    assert code == 0 and server["greedy"]["largest_gap"] < 1e-3
    emit = PromptAnswer.emit
    monkeypatch.setattr(PromptAnswer, "emit", lambda self, tokens: emit(self, [*tokens[:-1], (tokens[-1] + 1) % 60]))
    wrong = answers(models, prompts, tmp_path / "wrong", draft=False, temperature=0.0, ignore_eos=False)
    code, (server,) = certified(models, tmp_path, wrong, None)
    test = server["greedy"]
    assert code == 1 and test["first_difference"]["id"] == "q0" and test["largest_gap"] > test["allowed"]


def test_answers_that_were_asked_for_otherwise_are_refused(models, prompts, control, tmp_path, capsys):
    greedy = answers(models, prompts, tmp_path / "greedy", draft=False, temperature=0.0)
    words = ["eval", "certify", "--target", models["target"], "--data", str(greedy), "--control", str(control)]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "control" in capsys.readouterr().err
