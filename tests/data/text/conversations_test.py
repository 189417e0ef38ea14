"""Fields of rows beside role and text reach the prompt, the mask or the counts; the oracle is jinja's own rendering."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import (
    ASSISTANT,
    CHATML,
    R1,
    SYSTEM,
    USER,
    chat,
    chat_model,
    learned,
    rendered,
    rows_of,
    text_of,
)

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.text.conversations import parse_columns, read_chat
from draftsmith.data.text.template import RowError, load_chat_tokenizer
from draftsmith.modules.types import InputError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = [
    {"role": USER, "content": "Warm?"},
    {"role": ASSISTANT, "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5 C", "tool_call_id": "abcdefghi"},
    {"role": ASSISTANT, "content": "No."},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(chat_model(tmp_path_factory.mktemp("targets") / "chatml", CHATML))


@pytest.fixture
def make(target, tmp_path):
    """`data prompts` of these rows, as JSONL or Parquet, with the target's template or another: (rows, counts)."""
    runs = iter(range(99))

    def make(rows: list[dict], template: str = "", table: bool = False, **settings):
        source = tmp_path / f"{next(runs)}.{'parquet' if table else 'jsonl'}"
        if table:
            pq.write_table(pa.Table.from_pylist(rows), source)
        else:
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if template:
            settings["chat_template"] = source.with_suffix(".jinja")
            settings["chat_template"].write_text(template)
        output = run(PromptsConfig(str(source), target, source.with_suffix(""), **settings))
        return rows_of(output), Manifest.read(output).counts

    return make


# As OpenAI, LlamaFactory and Glaive write them.
WRITTEN = {
    "objects": ([TOOL], CALL),
    "JSON text": (json.dumps([TOOL]), {**CALL, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}),
    "functions alone": ([TOOL["function"]], CALL),
    "functions with a type": ([{"type": "function", **TOOL["function"]}], CALL),
}


@pytest.mark.parametrize("case", WRITTEN)
@pytest.mark.parametrize("table", [False, True])
def test_tools_and_calls_reach_the_template_and_the_mask(make, case, table):
    tools, call = WRITTEN[case]
    said = [CALLED[0], {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]]
    # Other rows give a table fields that this one has not.
    other_call = {**CALL, "function": {"name": "clock", "arguments": {"zone": "CET"}}}
    other = {"role": ASSISTANT, "content": None, "tool_calls": [other_call]}
    rows = [{"messages": said, "tools": tools}, {"messages": [CALLED[0], other, *CALLED[2:]], "tools": None}]
    if case == "JSON text":
        rows = rows[:1]
    (first, *others), counts = make(rows, table=table, supervised=True)
    assert text_of(first) == rendered(CHATML, CALLED, tools=[TOOL])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert learned(first) == f"I look.\n{call}No.<|im_end|>"
    if others:
        assert (
            learned(others[0])
            == call.replace("weather", "clock").replace('city": "Oslo', 'zone": "CET') + "No.<|im_end|>"
        )
    # This template does not show the ids of calls.
    assert {name: value for name, value in counts.items() if name.endswith(("_ignored", "_not_shown"))} == {
        "tool_call_id_not_shown": len(rows)
    }


ANSWER = chat((USER, "Q"), (ASSISTANT, "A"))
NAMED = chat((SYSTEM, "Be brief."), *((m["role"], m["content"]) for m in ANSWER))
COLUMNS = [
    ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "Be brief."}, NAMED),
    ({"messages": ANSWER, "system_prompt": "Be brief."}, NAMED),
    ({"prompt": "Q", "answer": "A", "system_prompt": "Be brief."}, NAMED),
    ({"messages": ANSWER, "system": "  "}, ANSWER),
    ({"turns": ["Q", "R"], "system": "Be brief."}, NAMED[:2]),
    (
        {"instruction": "Q", "output": "A", "system": "Be brief.", "history": [["1", "2"], ["3", "4"]]},
        [NAMED[0], *chat((USER, "1"), (ASSISTANT, "2"), (USER, "3"), (ASSISTANT, "4")), *ANSWER],
    ),
    # A Parquet file of chats with both ways of naming roles.
    ({"messages": [{"role": None, "content": None, "from": "human", "value": "Q"}]}, ANSWER[:1]),
]


@pytest.mark.parametrize(("row", "messages"), COLUMNS)
def test_columns_beside_a_chat_become_its_messages(row, messages):
    found = read_chat(row, {})
    assert found.messages == messages and not found.ignored


MEDIA = [
    {"messages": [{"role": USER, "content": [{"type": "text", "text": "Q"}, {"type": kind, kind: "a"}]}, *ANSWER[1:]]}
    for kind in ("image", "image_url", "input_image", "video", "input_audio")
]
MEDIA += [  # LLaVA, TRL, Ollama
    {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nQ"}, {"from": "gpt", "value": "A"}]},
    {"images": ["a.jpg"], "messages": ANSWER},
    {"messages": [{"role": USER, "content": "Q", "images": ["a.jpg"]}, *ANSWER[1:]]},
    # MMMU, Parquet's own images, DashScope
    {"image_1": {"bytes": "x", "path": None}, "messages": ANSWER},
    {"scan": {"bytes": "x", "path": None}, "messages": ANSWER},
    {"video_path": "a.mp4", "messages": ANSWER},
    {"messages": [{"role": USER, "content": [{"image": "a.jpg"}, {"text": "Q"}]}, *ANSWER[1:]]},
]


def test_rows_with_images_and_sound_are_named_and_counted(make):
    for row in MEDIA:
        with pytest.raises(RowError, match="expected text alone"):
            read_chat(row, {})
    text = {"image": {"bytes": None, "path": None}, "images": [None], "audio": False, "messages": ANSWER}
    with pytest.raises(InputError, match=r"text with image_url, expected text alone.*--invalid drop"):
        make([MEDIA[1], text])
    kept, counts = make([*MEDIA, text], invalid="drop")
    assert len(kept) == 1 and counts["media_dropped"] == len(MEDIA)


def test_columns_beside_a_chat_can_be_mapped():
    mapping = parse_columns("prompt=q,system=rules,tools=functions")
    found = read_chat({"q": "Q", "rules": "Be brief.", "functions": [TOOL]}, mapping)
    assert (found.messages, found.inputs) == (NAMED[:2], {"tools": [TOOL]})


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("weight", 0.0), ("loss", False), ("train", False)])
def test_an_answer_that_is_not_to_be_learned_is_context(make, key, value):
    said = chat((USER, "Q"), (ASSISTANT, "BAD"), (USER, "Q"), (ASSISTANT, "GOOD"))
    said = [said[0], {**said[1], key: value}, *said[2:]]
    (row,), _ = make([{"messages": said, "system": "s"}], supervised=True)
    assert "BAD" in text_of(row) and learned(row) == "GOOD<|im_end|>"
    dropped, counts = make([{"messages": said[:2]}, {"messages": said}], supervised=True, invalid="drop")
    assert len(dropped) == 1 and counts["invalid_dropped"] == 1


def test_what_is_not_read_or_not_shown_is_counted_by_its_name(make):
    """The template lists the tools and prints no calls: the name of a function in the text says nothing about them."""
    template = CHATML.replace("{%- elif m.tool_calls %}", "{%- elif false %}")
    thought = {**ANSWER[1], "reasoning": "hm", "thinking": [1], "markdown": "x", "weight": 0.5, "empty": None}
    rows = [
        {"messages": [ANSWER[0], thought]},
        {"messages": NAMED, "system": "Other.", "history": "none", "tools": "?", "chat_template_kwargs": {"mood": 1}},
        {"messages": CALLED, "tools": [TOOL]},
    ]
    _, counts = make(rows, template, supervised=True)
    assert {name: value for name, value in counts.items() if name.endswith(("_ignored", "_not_shown"))} == {
        "reasoning_content_not_shown": 1, "thinking_ignored": 1, "markdown_ignored": 1, "weight_ignored": 1,
        "system_ignored": 1, "history_ignored": 1, "tools_ignored": 1, "chat_template_kwargs_not_shown": 1,
        "tool_calls_not_shown": 1, "tool_call_id_not_shown": 1,
    }  # fmt: skip
    without_tools = CHATML.replace("{%- if tools %}", "{%- if false %}")
    assert make(rows[2:], without_tools, turns="last")[1]["tools_not_shown"] == 1


def test_answers_may_be_empty_where_they_are_not_read(make):
    rows = [
        {"messages": [CALLED[0], {"role": ASSISTANT, "content": None, "tool_calls": [{}]}, CALLED[0]]},
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "gpt", "value": ""},
                {"from": "human", "value": "R"},
            ]
        },
    ]
    kept, counts = make(rows)
    assert len(kept) == 2 and counts["later_turns"] == 2
    with pytest.raises(InputError, match="line 1: found an assistant turn has no text"):
        make(rows[1:], turns="last")
    named = [ANSWER[0], {"role": ASSISTANT, "name": "bot", "content": ""}, ANSWER[0]]
    with pytest.raises(InputError, match="line 1: found an assistant turn has no text"):
        make([{"messages": named}], turns="last")
    with pytest.raises(InputError, match="line 1: found an assistant turn has no text"):
        make([{"messages": [*ANSWER, ANSWER[0], {"role": ASSISTANT, "content": ""}]}], supervised=True)


def test_variables_of_a_row_reach_the_template(make):
    template = CHATML.replace(
        "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>' + mood + '\\n' }}{%- endif %}"
    )
    (row,), _ = make([{"prompt": "Q", "chat_template_kwargs": {"mood": "calm"}}], template, invalid="drop")
    assert text_of(row, "prompt_ids") == rendered(template, ANSWER[:1], mood="calm", add_generation_prompt=True)
    assert json.loads(row["template_inputs"]) == {"variables": {"mood": "calm"}}


@pytest.mark.parametrize("blank", [None, "", " ", []])
def test_a_blank_thought_hides_no_filled_one(blank):
    for filled in ("reasoning", "thinking"):
        said = [ANSWER[0], {**ANSWER[1], "reasoning_content": blank, filled: "hm"}]
        found = read_chat({"messages": said}, {})
        assert found.messages[1]["reasoning_content"] == "hm" and not found.ignored


FIRST = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def test_messages_that_the_template_drops_are_counted(make):
    """A template that reads a system message at the first place only, and no results of tools."""
    shown = {"messages": NAMED}
    developer = {"messages": [{"role": "developer", "content": "Also."}, *NAMED]}
    middle = {"messages": [*ANSWER, *NAMED]}
    result = {"messages": [ANSWER[0], {"role": "tool", "content": "2"}, ANSWER[1]]}
    for turns in ("all", "each"):
        counted = [
            {name: n for name, n in make([row], FIRST, supervised=True, turns=turns)[1].items()
             if name.endswith("_message_not_shown")}
            for row in (shown, developer, middle, result)
        ]  # fmt: skip
        assert counted == [{}, *[{"system_message_not_shown": 1}] * 2, {"tool_message_not_shown": 1}], turns


def test_messages_between_later_answers_that_the_template_drops_are_counted(make):
    (row,), counts = make([{"messages": [*ANSWER, *NAMED]}], FIRST)
    assert json.loads(row["later"]) == [NAMED[:2]] and counts["system_message_not_shown"] == 1
    # A template that refuses such a message does so when the turn is asked.
    refuses = FIRST.replace("{% if", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% if", 1)
    assert make([{"messages": [*ANSWER, *NAMED]}], refuses)[1]["later_turns"] == 1


def test_thoughts_in_an_answers_text_are_counted_where_the_template_drops_them(make):
    said = chat((USER, "Q"), (ASSISTANT, "<think>hm</think>A"), (USER, "Q"), (ASSISTANT, "<think>1</think>A1"))
    for turns, supervised in (("all", True), ("last", False)):
        _, counts = make([{"messages": said}], R1, turns=turns, supervised=supervised)
        assert counts["assistant_message_not_shown"] == 1
        _, counts = make([{"messages": said}], turns=turns, supervised=supervised)
        assert "assistant_message_not_shown" not in counts


THOUGHTLESS = "m.content.split('</think>')[-1]"


@pytest.mark.parametrize("template", [
    R1, R1.replace(THOUGHTLESS, "'<think>\n</think>' + " + THOUGHTLESS),
    R1.replace(THOUGHTLESS, "'<think>\n\n</think>' + m.content"),
], ids=["dropped", "tags alone", "an empty one before"])  # fmt: skip
@pytest.mark.parametrize("written", ["<think>\nhm\n</think>\n\nA", "hm\n</think>\n\nA"])
def test_a_thought_continues_the_prompt_that_opens_it(make, template, written):
    """As the model wrote it behind the prompt that a server makes; with the tag that the prompt has, or without."""
    messages = chat((USER, "Q"), (ASSISTANT, written))
    (row,), counts = make([{"messages": messages}], template, supervised=True, turns="each")
    assert text_of(row) == "<|User|>Q<|Assistant|><think>\n" + learned(row)
    assert learned(row) == written.removeprefix("<think>\n") + "<|eos|>"
    assert "assistant_message_not_shown" not in counts


def test_a_thought_of_its_own_field_continues_the_prompt_too(make):
    settings = {"template": R1, "supervised": True, "turns": "each"}
    thought = {"role": ASSISTANT, "content": "A", "reasoning_content": "hm"}
    (row,), counts = make([{"messages": [{"role": USER, "content": "Q"}, thought]}], **settings)
    assert text_of(row) == "<|User|>Q<|Assistant|><think>\n" + learned(row)
    assert learned(row) == "hm\n</think>\n\nA<|eos|>" and not {name for name in counts if "not_shown" in name}
    # Of a second thought, and of an answer behind another prompt than the server's, counts tell.
    said = chat((USER, "Q"), (ASSISTANT, "<think>\nhm\n</think>\n\nA"))
    for other, count in (("hm", {}), ("so", {"reasoning_content_not_shown": 1})):
        _, counts = make([{"messages": [said[0], {**said[1], "reasoning_content": other}]}], **settings)
        assert {name: value for name, value in counts.items() if value and "not_shown" in name} == count
    (row,), counts = make([{"messages": chat((USER, "Q"), (ASSISTANT, "A"))}], **settings)
    assert text_of(row) == "<|User|>Q<|Assistant|>A<|eos|>" and counts["prompt_not_shown"] == 1


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index"])
def test_text_with_the_token_of_an_image_is_none(chain, remake, tmp_path, key):
    """A multimodal target reads the image in its place, which is not there."""
    directory = Path(shutil.copytree(chain.configs["prompts"].target, tmp_path / "target"))
    config = json.loads((directory / "config.json").read_text())
    tokenizer = load_chat_tokenizer(str(directory))
    word = tokenizer("function", add_special_tokens=False)["input_ids"][0]
    shown = tokenizer.convert_ids_to_tokens(word)
    (directory / "config.json").write_text(json.dumps({**config, key: word}))
    with pytest.raises(InputError, match=rf"text with {shown}, in whose place the target reads an image"):
        remake("prompts", target=str(directory))
    counts = Manifest.read(remake("prompts", target=str(directory), invalid="drop")).counts
    rows = Path(chain.configs["prompts"].source).read_text().splitlines()
    assert 0 < counts["media_dropped"] == sum(shown in json.loads(row)["prompt"] for row in rows)
