"""Rows of `eval served`, from answers with known times and rounds."""

from __future__ import annotations

import pytest

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.engines.chain import EngineAnswer
from draftsmith.eval.engines.llamacpp import Round, ServerAnswer
from draftsmith.eval.engines.served import PLAIN, as_rounds, summary
from draftsmith.modules.types import InputError


def prompt(number: int, task: str) -> BenchPrompt:
    return BenchPrompt(id=f"p{number}", task=task, prompt_ids=[1, 2], number=number)


def answer(count: int, seconds: float, *rounds: tuple[int, int]) -> ServerAnswer:
    return ServerAnswer(tuple(range(count)), tuple(Round(*one) for one in rounds), 0.1, seconds)


def test_tau_counts_target_calls_and_speed_leaves_out_the_prompt():
    prompts = [prompt(0, "code"), prompt(1, "chat")]
    plain = [answer(9, 4.0), answer(5, 2.0)]  # 12 tokens behind the prompts' own in 6 s
    # Three rounds of 2, 1 and 2 accepted give 8 tokens; two of 1 and 0, with one plain step, give 4.
    drafted = [answer(9, 2.0, (3, 2), (3, 1), (3, 2)), answer(5, 2.0, (3, 1), (3, 0))]
    row = summary("n-max=3", drafted, plain, prompts, 0.0)
    assert row["tokens_per_s"] == pytest.approx(12 / 4) and row["speedup"] == pytest.approx(1.5)
    assert row["speedup_ci95"] == pytest.approx([1.0, 2.0])
    assert row["tau_by_task"] == {"chat": pytest.approx(4 / 3), "code": pytest.approx(8 / 3)}
    assert row["tau"] == pytest.approx(12 / 6) and row["first"] == pytest.approx(4 / 5) and row["equal"] == "yes"
    base = summary(PLAIN, plain, plain, prompts, 0.0)
    assert (base["speedup"], base["tau"], base["first"], base["speedup_ci95"]) == (1.0, 1.0, None, None)


def test_a_last_draft_that_ends_the_answer_is_a_call():
    # The drafted end token is accepted, and the target's own token behind it is not emitted.
    row = summary("n-max=2", [answer(6, 1.0, (2, 1), (2, 2))], [answer(6, 1.0)], [prompt(0, "")], 1.0)
    assert row["tau"] == pytest.approx(5 / 2) and row["equal"] == "-"


def test_answers_of_one_token_have_no_speed():
    short = [answer(1, 0.0)]
    for ours, theirs in ((short, [answer(6, 1.0)]), ([answer(6, 1.0)], short)):
        with pytest.raises(InputError, match="answers of one token each"):
            summary("n-max=2", ours, theirs, [prompt(0, "")], 1.0)


def test_vllms_counts_by_place_are_rounds():
    # Of 5 rounds of 3 tokens, 4 accepted one or more, 2 two or more, 1 all three.
    reply = as_rounds(EngineAnswer(tuple(range(13)), (5, 4, 2, 1), 2.0), 3)
    assert sorted(one.accepted for one in reply.rounds) == [0, 1, 1, 2, 3] and reply.generation_s == 2.0
    row = summary("num_speculative_tokens=3", [reply], [answer(13, 4.0)], [prompt(0, "")], 0.0)
    assert (row["tau"], row["first"], row["speedup"]) == pytest.approx((12 / 5, 4 / 5, 2.0))
    assert as_rounds(EngineAnswer((1, 2), (), 1.0), 0).rounds == ()
