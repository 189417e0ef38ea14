"""Later turns show earlier answers as sampled, and the date of the prompts, with templates like public ones."""

from __future__ import annotations

import datetime
import json

import pytest
from chat_templates import CHATML, HARMONY, LLAMA3, MISTRAL, chat_model, chat_tokenizer
from turn_taking import ASSISTANT, USER, chat, rows_of

from draftsmith.data import prompts
from draftsmith.data.engines.openai import chat_body
from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import STARTED, Manifest
from draftsmith.data.text.template import prompt_ids
from draftsmith.data.text.turns import Conversation, TargetTurn, turns_tokenizer
from draftsmith.eval.bench.prompts import BenchPrompt, next_turn
from draftsmith.modules.types import InputError

ASK = chat((USER, "Q"))


def conversation(tokenizer, later: list[list[dict]]) -> Conversation:
    ids = prompt_ids(tokenizer, ASK)
    row = {"id": "a", "prompt_ids": ids, "messages": json.dumps(ASK), "task": "", "later": json.dumps(later)}
    return Conversation(row, tokenizer, 2048)


# Template, end token, later messages, sampled answers, and what is asked after each.
ASKED = "<|end|><|start|>user<|message|>Q<|end|><|start|>assistant"
CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A"
TURNS = {
    "channels": (
        HARMONY, [ASK, ASK], [CHANNELS + "<|return|>", "<|channel|>final<|message|>B<|return|>"],
        [CHANNELS + ASKED, "<|channel|>final<|message|>B" + ASKED],
    ),
    # The second answer has no structure; the first one keeps its own.
    "channels, then plain text": (
        HARMONY, [ASK, ASK], [CHANNELS + "<|return|>", "B<|return|>"],
        [CHANNELS + ASKED, "B" + ASKED],
    ),
    "a call that ends with a token of its own": (
        LLAMA3.partition("{%- for")[1] + LLAMA3.partition("{%- for")[2],
        [[{"role": "tool", "content": "5"}]], ["<|python_tag|>f(1)<|eom|>"],
        ["<|python_tag|>f(1)<|eom|><|header|>ipython<|/header|>\n\n5<|eot|><|header|>assistant<|/header|>\n\n"],
    ),
    "a call, and the user speaks": (
        MISTRAL, [ASK], ['[TOOL_CALLS][{"name": "f"}]</s>'], ['[TOOL_CALLS][{"name": "f"}]</s>[INST] Q[/INST]'],
    ),
    "no structure": (
        CHATML, [ASK], ["A <|im_end|>"],
        ["A <|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS)
def test_a_later_turn_shows_an_answer_as_it_was_sampled(case):
    template, later, answers, asked = TURNS[case]
    tokenizer = chat_tokenizer(template)
    talk = conversation(tokenizer, later)
    text = tokenizer.decode(talk.prompt)
    prompt = BenchPrompt("a", talk.prompt, messages=tuple(ASK), later=tuple(m[0]["content"] for m in later))
    for answer, behind in zip(answers, asked, strict=True):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        talk.add_answer(TargetTurn(ids, True))
        text += behind
        assert tokenizer.decode(talk.prompt) == text and not talk.counts.keys() - {"rows_split"}
        if later[0][0]["role"] == USER:  # the bench shows them alike
            prompt = next_turn(tokenizer, prompt, ids)
            assert prompt.prompt_ids == talk.prompt


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime(2031, 1, 2)


def test_a_templates_date_is_that_of_the_prompts(tmp_path, monkeypatch):
    """On a later day the same command continues, and later turns show the first day."""
    said = chat((USER, "Q"), (ASSISTANT, "A"), (USER, "R"))
    source, target = tmp_path / "x.jsonl", str(chat_model(tmp_path / "target", LLAMA3))
    source.write_text(json.dumps({"messages": said}) + "\n" + json.dumps({"id": "b", "messages": said}) + "\n")
    config = PromptsConfig(str(source), target, tmp_path / "out", rows_per_shard=1)
    today = datetime.date.today()
    rows = rows_of(run(config))
    shown = today.strftime("Today: %d %b %Y")
    assert shown in chat_tokenizer(LLAMA3).decode(rows[0]["prompt_ids"])
    assert Manifest.read(config.output).identity["template_date"] == today.isoformat()

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    monkeypatch.setattr(prompts, "datetime", type("later", (), {"date": Tomorrow}))
    for name in ("manifest.json", "shard-00001.done.json"):
        (config.output / name).unlink()
    assert rows_of(run(config)) == rows and (config.output / STARTED).exists()
    manifest = Manifest.read(config.output)
    talk = Conversation(rows[0], turns_tokenizer(target, manifest, None), 2048)
    ids = chat_tokenizer(LLAMA3)("A<|eot|>", add_special_tokens=False)["input_ids"]
    talk.add_answer(TargetTurn(ids, True))
    assert talk.prompt[: len(rows[0]["prompt_ids"]) + len(ids)] == [*rows[0]["prompt_ids"], *ids]
    # A server's own template would show another day.
    monkeypatch.setattr("draftsmith.data.engines.openai.datetime", type("later", (), {"date": Tomorrow}))
    with pytest.raises(InputError, match=rf"chat_template: found prompts of {today}, .*--server.dialect vllm"):
        chat_body(rows[0])
