"""Kinds of tokens, against texts whose parts are marked by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chats import chat_tokenizer

from draftsmith.data.text.kinds import kinds_of
from draftsmith.data.text.template import render
from draftsmith.eval.bench.results import add_kinds

# Parts of answers as the templates of these families write them, each with its kind.
ANSWERS = {
    "qwen3": [("thinking", "<think>\nUse `x` and ```py\n```.\n</think>"), ("prose", "\n\nSo: "),
              ("call", '<tool_call>\n{"name": "f", "arguments": {"code": "```"}}\n</tool_call>'), ("prose", "<eos>")],
    "code": [("prose", "Here:\n"), ("code", "```python\nprint(1)\n```"), ("prose", "\nand\n"), ("code", "```\n1\n```")],
    "tildes": [("code", "~~~\nx = '```'\n~~~"), ("prose", "\nand `~~~`.<eos>")],
    "longer fence": [("prose", "So:\n"), ("code", "````md\n```py\n1\n```\n````"), ("prose", "<eos>")],
    "no fence": [("prose", "Write ``` in text.\n"), ("code", "```\n1 ```\n```py\n```"), ("prose", "\nDone.")],
    "cut": [("prose", "Here:\n"), ("code", "```python\nprint(1")],
    "gpt-oss": [("thinking", "<|channel|>analysis<|message|>Need weather.<|end|>"), ("prose", "<|start|>assistant"),
                ("call", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>')],
    "gpt-oss-answer": [("thinking", "<|channel|>analysis<|message|>Easy.<|end|>"),
                       ("prose", "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>")],
    "mistral": [("call", '[TOOL_CALLS][{"name": "f", "arguments": {}}]</s>')],
    "llama-3": [("call", '{"name": "f", "parameters": {"x": "1"}}<|eot_id|>')],
    "llama-4": [("call", '[weather(city="Oslo"), time()]<|eot|>')],
    "deepseek": [("prose", "I call. "), ("call", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"), ("prose", "<eos>")],
    "minimax": [("call", '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>')],
    "seed": [("thinking", "<seed:think>hm</seed:think>"), ("prose", "4")],
    "gemma-4": [("thinking", "<|channel>thought\nhm<channel|>"), ("call", "<|tool_call>call:f{}<tool_call|>")],
    "json-answer": [("prose", '{"answer": 4} and [1, 2], a < b')],
}  # fmt: skip


@pytest.mark.parametrize("parts", ANSWERS.values(), ids=ANSWERS)
def test_a_token_is_of_the_part_that_its_first_character_stands_in(parts):
    text = "".join(part for _, part in parts)
    wanted = [kind for kind, part in parts for _ in part]
    rng = random.Random(text)
    for _ in range(20):  # tokens of any size, so that markers straddle; one may have no text of its own
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1)))
        begins, ends = [0, *cuts], [*cuts, len(text)]
        pieces = [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
        assert kinds_of(pieces) == [wanted[begin] for begin in begins]
    assert kinds_of(["", *text]) == [wanted[0], *wanted]


TEMPLATES = sorted((Path(__file__).parents[2] / "data/text/templates").glob("*.jinja"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_calls_and_thoughts_of_published_templates_are_found(template):
    tokenizer = chat_tokenizer(template.read_text())
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "sky", "description": "Find it.", "parameters": city}}]
    call = {"id": "call00001", "type": "function", "function": {"name": "sky", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Go?"},
        {"role": "assistant", "content": "", "reasoning_content": "a thought", "tool_calls": [call]},
        {"role": "tool", "content": "blue", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is blue."},
    ]
    for count, said, kind in ((1, "a thought", "thinking"), (1, "Oslo", "call"), (3, "It is blue.", "prose")):
        prompt = render(tokenizer, messages[:count], {"tools": tools}, add_generation_prompt=True)
        answered = render(tokenizer, messages[: count + 1], {"tools": tools})
        same = (place for place, (a, b) in enumerate(zip(prompt, answered, strict=False)) if a != b)
        begin = next(same, min(len(prompt), len(answered)))
        place, kinds = answered[begin:].rfind(said), kinds_of(list(answered[begin:]), answered[:begin])
        # Some templates show no thoughts.
        assert place >= 0 or kind == "thinking"
        assert place < 0 or kinds[place : place + len(said)] == [kind] * len(said)


def test_a_prompt_may_open_the_thinking_and_close_it():
    pieces = ["Hm", "</", "think", ">\n\n", "4"]
    assert kinds_of(pieces, "<|im_start|>assistant\n<think>\n") == ["thinking"] * 4 + ["prose"]
    assert kinds_of(pieces, "<|im_start|>assistant\n<think>\n\n</think>\n\n") == ["prose"] * 5


def test_a_round_has_the_kind_of_its_first_token():
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join(["<think>", "a", "</think>", "b\n", "```"][token] for token in ids)

    shared = {"temperature": 0.0, "prompt": 0, "turn": 1}
    rounds = [{"num_emitted": count} for count in (2, 1, 2, 0)]
    row = {**shared, "labels": {}, "prompt_ids": None, "token_ids": [1, 1, 2, 3, 4, 1], "rounds": rounds}
    row["prefill_emitted"] = 1
    baseline = {**row, "prompt_ids": [3, 0], "rounds": [{"num_emitted": 1}] * 5}
    add_kinds(rows := [baseline, row], Tokenizer())
    assert rows[0]["kinds"] == ["thinking", "thinking", "prose", "code", "code"]
    assert rows[1]["kinds"] == ["thinking", "prose", "code", "code"]
