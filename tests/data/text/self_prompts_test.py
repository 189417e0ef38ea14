"""Prompts that the target writes: where they begin, against the chat template itself, and what is kept of its turns."""

from __future__ import annotations

import json

import pytest
from worlds import tiny_tokenizer

from draftsmith.data import prompts, responses
from draftsmith.data.engines.own import OwnEngine
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.template import prompt_ids
from draftsmith.data.text.turns import TargetTurn
from draftsmith.modules.types import InputError

# What the target writes behind our first words, whether it ends, and what the prompt says of it (None: dropped).
WRITTEN = [
    ("Why?", True, "Why?"),
    ("Why?", True, None),  # a duplicate
    ("One. Two. And th", False, "One. Two."),
    ("No end in sigh", False, None),
    ("Hi<|end|><|assistant|>Ho", False, "Hi"),  # went on with the answer
]


def test_the_targets_own_turns_become_prompts(pair, tmp_path, monkeypatch):
    target, tokenizer = str(pair[0]), tiny_tokenizer()

    def answers(engine, turns):
        for number, (turn, (text, ended, _)) in enumerate(zip(turns, WRITTEN, strict=True)):
            # Up to our words it is what the template makes of a message that begins with them.
            whole = prompt_ids(tokenizer, [{"role": "user", "content": "?"}])
            assert turn.prompt_ids == whole[: len(turn.prompt_ids)] and len(whole) > len(turn.prompt_ids)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            yield number, TargetTurn([*ids, tokenizer.eos_token_id] if ended else ids, ended)

    monkeypatch.setattr(OwnEngine, "answers", answers)
    monkeypatch.setattr("draftsmith.data.text.self_prompts.OPENINGS", {"chat": ("",)})
    begun = prompts.run(PromptsConfig("self", target, tmp_path / "begun", limit=len(WRITTEN)))
    turns = responses.run(ResponsesConfig(begun, target, tmp_path / "turns"))
    whole = prompts.run(PromptsConfig(str(turns), target, tmp_path / "whole", invalid="drop"))
    rows = list(Rows(manifest := Manifest.read(whole)).iterate())
    expected = [text for _, _, text in WRITTEN if text]
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == expected
    assert [row["prompt_ids"] for row in rows] == [
        prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in expected
    ]
    assert {name: manifest.counts[f"{name}_dropped"] for name in ("duplicate", "unfinished")} == {
        "duplicate": 1,
        "unfinished": 1,
    }


def test_our_words_follow_the_opening(pair, tmp_path):
    output = prompts.run(PromptsConfig("self", str(pair[0]), tmp_path, tasks="maths", limit=2))
    tokenizer = tiny_tokenizer()
    for row in Rows(Manifest.read(output)).iterate():
        (message,) = json.loads(row["messages"])
        assert row["task"] == "maths" and tokenizer.decode(row["prompt_ids"]).endswith(message["content"])


def test_what_gives_no_prompts_is_refused(chain, pair, tmp_path):
    with pytest.raises(InputError, match="limit: found 0 with --source self"):
        prompts.run(PromptsConfig("self", str(pair[0]), tmp_path / "a"))
    with pytest.raises(InputError, match="responses to whole prompts"):
        prompts.run(PromptsConfig(str(chain.directory("responses")), str(pair[0]), tmp_path / "b"))
