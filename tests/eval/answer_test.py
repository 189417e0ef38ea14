"""Answers in Python: streamed, counted and shown as the command line has them."""

from __future__ import annotations

import html
import re

import pytest

import draftsmith
from draftsmith.eval.answer import encode
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

QUESTION = "Remove the docstring:\n\ndef f(x):\n    '''<b>Doc</b> \u00e9.'''\n    return x < 1"


@pytest.fixture(scope="module")
def target():
    return draftsmith.load_target("embedded:target")


@pytest.fixture
def drafter(target):
    return draftsmith.load_drafter("embedded:draft", target, "spec:k=3")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_the_decoders_own_generation(target, drafter, temperature):
    answer = draftsmith.generate(target, QUESTION, drafter, max_new_tokens=24, temperature=temperature, seed=3)
    streamed = [token for made in answer for token in made.tokens]
    params = SamplingParams(temperature)
    whole = generate_one(target, drafter, encode(target, QUESTION), params, 24, TorchSource(3))
    assert streamed == answer.tokens == whole.tokens
    assert answer.totals.tau == pytest.approx(whole.trace.num_tokens / whole.trace.num_target_calls)


def test_it_is_decoded_as_far_as_it_is_asked_for(target, drafter, monkeypatch):
    drafts = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *given: (drafts.append(1), propose(*given))[1])
    answer = draftsmith.generate(target, QUESTION, drafter, max_new_tokens=24)
    rounds = iter(answer)
    next(rounds)
    assert not drafts  # the prompt alone gives the first token
    second = next(rounds)
    assert len(drafts) == 1 and second.logits is not None
    assert list(answer)[1].tokens == second.tokens and list(answer)[1].logits is None
    done = len(drafts)
    assert answer.text and len(drafts) == done


def test_a_drafter_drafts_for_one_answer_at_a_time(target, drafter):
    first = draftsmith.generate(target, QUESTION, drafter, max_new_tokens=24)
    next(iter(first))
    second = draftsmith.generate(target, QUESTION, drafter, max_new_tokens=24)
    assert second.finish().tokens
    with pytest.raises(InputError, match="another answer has begun"):
        first.finish()


def test_a_notebook_is_shown_what_was_drafted_and_by_whom(target, drafter):
    answer = draftsmith.generate(target, QUESTION, drafter, max_new_tokens=48)
    page = answer._repr_html_()
    shown = re.findall(r'<span title="round (\d+)" style="background:(\w+\([^)]*\))[^"]*">([^<]*)</span>', page)
    assert html.unescape("".join(text for *_, text in shown)) == answer.text
    own = shown[0][1]  # the prompt gave the first token
    drafted = {made for made, color, _ in shown if color != own}
    assert drafted == {str(number) for number, made in enumerate(answer) if made.num_accepted}
    assert "<b>" not in page and f"tau {answer.totals.tau:.2f}" in page


def test_every_public_name_is_there():
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name) is not None, name
    assert set(draftsmith.__all__) == {"__version__", *draftsmith.PUBLIC}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        draftsmith.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1.9, 2.2], "found .1.9, 2.2., expected token ids"),
        ([10**9], "id 1000000000"),
        ([{"role": "user", "content": "x"}, 3], "message 1: found 3"),
    ],
)
def test_a_prompt_that_is_none_is_refused_in_one_line(target, prompt, says):
    with pytest.raises(InputError, match=says):
        draftsmith.generate(target, prompt, max_new_tokens=2)
