"""What counts as an answer of a server: replies that are right, and the many that are not."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_tokenizer

from draftsmith.data.engines.server_answer import BadAnswer, Question, ReplyReader
from draftsmith.modules.types import InputError

GOOD = {"text": "def add", "finish_reason": "length"}
ODD_ANSWERS: list[tuple[object, str]] = [
    ("hello", "no completion"),
    ({"choices": None}, "no completion"),
    ({"choices": [[]]}, "no completion"),
    ({"choices": [{"text": "a", "finish_reason": "content_filter"}]}, "finish_reason"),
    ({"choices": [{"text": "a"}]}, "finish_reason null"),
    *(
        ({"choices": [{**GOOD, "token_ids": ids}]}, what)
        for ids, what in [
            ([-1], "token id -1"), ([999_999], "token id 999999"), ([None], "token id null"), ([5.5], "token id 5.5"),
            ([True], "token id true"), (["5"], 'token id "5"'), ([[5]], r"token id \[5\]"), ({"5": 1}, "token_ids are"),
            ("55", "token_ids are"), ([5] * 100_000, "100,000 token ids where at most 9"), ([], "an empty answer|text"),
        ]
    ),
    ({"choices": [{**GOOD, "text": 5}]}, "text is 5"),
    ({"choices": [{**GOOD, "text": None}]}, "neither text nor token ids"),
    ({"choices": [{**GOOD, "text": ""}]}, "an empty answer"),
    ({"choices": [{**GOOD, "text": "a\ud800"}]}, "half of a surrogate pair"),
    ({"choices": [{**GOOD, "text": "def " * 1000}]}, "a text of .* tokens where at most 9"),
    ({"choices": [GOOD], "usage": {"completion_tokens": "7"}}, "completion_tokens"),
    ({"choices": [GOOD], "usage": {"completion_tokens": 2**40}}, "completion_tokens"),
    ({"choices": [GOOD], "usage": {"completion_tokens": 10}}, "10 tokens by its own count"),
    ({"choices": [{**GOOD, "text": "import os", "token_ids": "DEF"}]}, "another tokenizer"),
    ({"choices": [{**GOOD, "token_ids": "DEF"}], "usage": {"completion_tokens": 9}}, "completion_tokens 9"),
    ({"choices": [{**GOOD, "token_ids": "DEF", "logprobs": {"tokens": []}}]}, None),
    ({"choices": [{**GOOD, "token_ids": "DEF", "logprobs": {"tokens": ["a"] * 9}}]}, "log-probabilities of 9"),
    (
        {"choices": [{"finish_reason": "stop", "message": {"content": "def", "reasoning_content": "hm"}}]},
        "reasoning_content",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD_ANSWERS)))
def test_an_answer_is_checked_against_vocabulary_limits_and_itself(number):
    reply, what = json.loads(json.dumps(ODD_ANSWERS[number]))
    tokenizer = tiny_tokenizer()
    ids = tokenizer("def add", add_special_tokens=False)["input_ids"]
    if isinstance(reply, dict) and reply["choices"] and reply["choices"][0]:
        choice = reply["choices"][0]
        choice |= {"token_ids": ids} if choice.get("token_ids") == "DEF" else {}
    reader, asked = ReplyReader(tokenizer, len(tokenizer), (1,)), Question("prompt 3", [4, 5], 9, "tiny")
    if what is None:
        assert reader.read(asked, reply)["input_ids"] == [4, 5, *ids]
        return
    with pytest.raises(BadAnswer, match=what):
        reader.read(asked, reply)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model": "huge"}, r"server\.model: found an answer by 'huge', expected 'tiny'"),
        ({"usage": {"prompt_tokens": 3}}, "prompt 3: found 3 tokens at the server"),
        ({"prompt_token_ids": [4, 6]}, r"prompt 3: found the prompt \[4, 6\] at the server"),
    ],
)
def test_another_model_or_template_ends_the_stage(more, what):
    tokenizer = tiny_tokenizer()
    with pytest.raises(InputError, match=what):
        ReplyReader(tokenizer, len(tokenizer), (1,)).read(
            Question("prompt 3", [4, 5], 9, "tiny"), {"choices": [GOOD], **more}
        )


def test_an_end_token_is_added_only_where_the_server_hides_one():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("def add", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    reader, asked = ReplyReader(tokenizer, len(tokenizer), (end,)), Question("prompt 3", [4, 5], 9, "tiny")
    for counted, whole in ((len(ids) + 1, [*ids, end]), (len(ids), ids)):  # counted alike: a stop string ended it
        choice = {"text": "def add", "finish_reason": "stop", "token_ids": list(ids)}
        row = reader.read(asked, {"choices": [choice], "usage": {"completion_tokens": counted}})
        assert (row["input_ids"], row["ended"]) == ([4, 5, *whole], whole != ids)
