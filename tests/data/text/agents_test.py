"""Sessions of agents, with tools and thoughts: as they are written, by the templates of published models.

The oracle of tokens is transformers' own `apply_chat_template`; that of masks is the text, read by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import chat_model, chat_tokenizer, rows_of

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.text.agents import openai_turns
from draftsmith.data.text.answers import spans
from draftsmith.data.text.conversations import read_chat
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.types import InputError

TEMPLATES = Path(__file__).parent / "templates"
# Template -> its end token, other end tokens, and other special tokens.
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "llama-3.1": ("<|eot_id|>", ("<|eom_id|>",), ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "qwen2.5": ("<|im_end|>", (), ()),
    "qwen3": ("<|im_end|>", (), ()),
    "qwen3.5": ("<|im_end|>", (), ()),
    "hermes-3": ("<|im_end|>", (), ()),
    "mistral-nemo": ("</s>", (), ()),
    "gpt-oss": ("<|return|>", ("<|call|>",), ("<|constrain|>",)),
    "deepseek-v3.1": (
        "<｜end▁of▁sentence｜>", (), ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁end｜>"),
    ),
    "glm-4.6": ("<|endoftext|>", ("<|user|>", "<|observation|>"), ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>")),
    "kimi-k2": ("<|im_end|>", (), ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")),
    "minimax-m2": ("[e~[", (), ("]~!b[", "]~b]")),
    "granite-4.0": ("<|end_of_text|>", (), ("<|start_of_role|>", "<|end_of_role|>")),
    "gemma-4": ("<turn|>", ("<|tool_response>",), ("<|turn>", "<|tool_call>", "<tool_call|>", "<tool_response|>")),
}  # fmt: skip


def function(name: str) -> dict:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": name, "description": f"Find the {name}.", "parameters": city}


TOOLS = [{"type": "function", "function": function(name)} for name in ("sky", "sea")]


def call(number: int, name: str, city: str) -> dict:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": {"city": city}}}


def session(family: str) -> list[dict]:
    """Two questions, the first answered by way of three calls, as far as the template takes it."""
    calls = [call(1, "sky", "Oslo"), call(2, "sea", "Rome")]
    results = [{"role": "tool", "content": f"result {i}", "tool_call_id": f"call0000{i}"} for i in (1, 2, 3)]
    # Two templates take one call at a time. gpt-oss's takes no text beside a thought, and Gemma's shows it elsewhere.
    one, plain = family in ("llama-3.1", "gpt-oss"), family in ("gpt-oss", "gemma-4")
    return [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go?"},
        {
            "role": "assistant", "content": "" if plain else "I look.", "reasoning_content": "hm 1",
            "tool_calls": calls[:1] if one else calls,
        },
        *results[: 1 if one else 2],
        {"role": "assistant", "content": "", "reasoning_content": "hm 2", "tool_calls": [call(3, "sea", "Nice")]},
        results[2],
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm 3"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "hm 4"},
    ]  # fmt: skip


def openai_row(messages: list[dict]) -> dict:
    """The session as the protocol has it: arguments are JSON, and a message of calls has no content."""
    written = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        written.append({**message, "content": message["content"] or None, **({"tool_calls": calls} if calls else {})})
    return {"messages": written, "tools": TOOLS}


def anthropic_row(messages: list[dict]) -> dict:
    """The session as Anthropic's protocol has it: blocks, results in the user's turns, the system beside them."""
    turns: list[dict] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            # A result is a text or blocks.
            blocks = [{"type": "text", "text": message["content"]}] if len(turns) > 2 else message["content"]
            block = {**result, "content": blocks}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(block)
            else:
                turns.append({"role": "user", "content": [block]})
            continue
        thought = message.get("reasoning_content")
        blocks = [{"type": "thinking", "thinking": thought, "signature": "x"}] if thought else []
        blocks += [{"type": "text", "text": message["content"]}] if message["content"] else []
        for one in message.get("tool_calls", ()):
            made = one["function"]
            blocks.append({"type": "tool_use", "id": one["id"], "name": made["name"], "input": made["arguments"]})
        turns.append({"role": message["role"], "content": blocks})
    bare = [tool["function"] for tool in TOOLS]
    tools = [{**tool, "input_schema": tool["parameters"]} for tool in bare]
    tools = [{key: value for key, value in tool.items() if key != "parameters"} for tool in tools]
    return {"system": [{"type": "text", "text": messages[0]["content"]}], "messages": turns, "tools": tools}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A tiny target with the template and special tokens of a family: (directory, tokenizer)."""

    def made(family: str):
        end, ends, others = FAMILIES[family]
        template, more = (TEMPLATES / f"{family}.jinja").read_text(), (end, *ends, *others)
        tokenizer = chat_tokenizer(template, end, more)
        ids = tokenizer.convert_tokens_to_ids([end, *ends])
        path = root / family
        if not path.exists():
            chat_model(path, template, end, more, max_position_embeddings=8192, eos_token_id=ids)
        return path, tokenizer

    root = tmp_path_factory.mktemp("targets")
    return made


def prompts_of(target: Path, row: dict, output: Path, **settings) -> tuple[list[dict], dict[str, int]]:
    source = output.with_suffix(".jsonl")
    source.write_text(json.dumps(row))
    directory = run(PromptsConfig(str(source), str(target), output, **settings))
    return rows_of(directory), Manifest.read(directory).counts


def learned(tokenizer, row: dict) -> list[str]:
    return [tokenizer.decode(row["input_ids"][start:end]) for start, end in spans(row["loss_mask"])]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_of_a_session_is_asked_as_transformers_renders_it(family, targets, tmp_path):
    target, tokenizer = targets(family)
    messages = session(family)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for form in (openai_row, anthropic_row):
        rows, counts = prompts_of(target, form(messages), tmp_path / form.__name__, turns="each")
        assert [(row["id"], row["turn"]) for row in rows] == [
            ("0000000", 1), *((f"0000000/turn-{turn}", turn) for turn in (2, 3, 4))
        ]  # fmt: skip
        for row, place in zip(rows, places, strict=True):
            expected = tokenizer.apply_chat_template(
                messages[:place], tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            assert row["prompt_ids"] == expected["input_ids"]
        ignored = {"signature_ignored": 1} if form is anthropic_row else {}
        assert {name: value for name, value in counts.items() if name.endswith("_ignored")} == ignored


def chatml_calls(*pairs: tuple[str, str]) -> str:
    shown = (f'{{"name": "{name}", "arguments": {{"city": "{city}"}}}}' for name, city in pairs)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)


SKY, SEA, NICE = ("sky", "Oslo"), ("sea", "Rome"), ("sea", "Nice")
QWEN2 = [f"I look.\n{chatml_calls(SKY, SEA)}<|im_end|>", f"{chatml_calls(NICE)}<|im_end|>", "Yes.<|im_end|>"]
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|><|im_end|>"
# Template -> what the target samples in each turn. Earlier thoughts are learned where a template keeps them.
LEARNED = {
    "llama-3.1": [
        *(f'{{"name": "{name}", "parameters": {{"city": "{city}"}}}}<|eot_id|>' for name, city in (SKY, NICE)),
        "Yes.<|eot_id|>", "Sure.<|eot_id|>",
    ],
    "qwen2.5": [*QWEN2, "Sure.<|im_end|>"],
    "qwen3": [*QWEN2, "<think>\nhm 4\n</think>\n\nSure.<|im_end|>"],
    "qwen3.5": [
        "I look.\n\n<tool_call>\n<function=sky>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=sea>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>",
        "<tool_call>\n<function=sea>\n<parameter=city>\nNice\n</parameter>\n</function>\n</tool_call><|im_end|>",
        "Yes.<|im_end|>", "hm 4\n</think>\n\nSure.<|im_end|>",
    ],
    "hermes-3": [f"{chatml_calls(SKY, SEA)}<|im_end|>", QWEN2[1], "Yes.<|im_end|>", "Sure.<|im_end|>"],
    "mistral-nemo": [
        '[TOOL_CALLS][{"name": "sky", "arguments": {"city": "Oslo"}, "id": "call00001"}, '
        '{"name": "sea", "arguments": {"city": "Rome"}, "id": "call00002"}]</s>',
        '[TOOL_CALLS][{"name": "sea", "arguments": {"city": "Nice"}, "id": "call00003"}]</s>', "Yes.</s>", "Sure.</s>",
    ],
    "gpt-oss": [
        *(f' to=functions.{name}<|channel|>commentary json<|message|>{{"city": "{city}"}}<|call|>'
          for name, city in (SKY, NICE)),
        "<|channel|>final<|message|>Yes.<|end|>",
        "<|channel|>analysis<|message|>hm 4<|end|><|start|>assistant<|channel|>final<|message|>Sure.<|return|>",
    ],
    "deepseek-v3.1": [
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>sky<｜tool▁sep｜>{\"city\": \"Oslo\"}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>sea<｜tool▁sep｜>{\"city\": \"Rome\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>sea<｜tool▁sep｜>{\"city\": \"Nice\"}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "Yes.<｜end▁of▁sentence｜>", "Sure.<｜end▁of▁sentence｜>",
    ],
    # Its answers end with the token in front of the next turn.
    "glm-4.6": [
        "\n<think></think>\nI look.\n<tool_call>sky\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
        "\n<tool_call>sea\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\n<tool_call>sea\n<arg_key>city</arg_key>\n<arg_value>Nice</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think></think>\nYes.<|user|>", "\n<think>hm 4</think>\nSure.",
    ],
    "kimi-k2": [
        "I look." + KIMI.format("".join(
            f'<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{{"city": "{city}"}}<|tool_call_end|>'
            for i, (name, city) in enumerate((SKY, SEA))
        )),
        KIMI.format(
            '<|tool_call_begin|>functions.sea:0<|tool_call_argument_begin|>{"city": "Nice"}<|tool_call_end|>'
        ),
        "Yes.<|im_end|>", "Sure.<|im_end|>",
    ],
    "minimax-m2": [
        'I look.\n<minimax:tool_call>\n<invoke name="sky">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="sea">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
        '<minimax:tool_call>\n<invoke name="sea">\n<parameter name="city">Nice</parameter>\n</invoke>\n'
        "</minimax:tool_call>[e~[",
        "Yes.[e~[", "hm 4\n</think>\n\nSure.[e~[",
    ],
    "granite-4.0": [part.replace("<|im_end|>", "<|end_of_text|>") for part in (*QWEN2, "Sure.<|im_end|>")],
    "gemma-4": [
        '<|tool_call>call:sky{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:sea{city:<|"|>Rome<|"|>}<tool_call|>'
        "<|tool_response>",
        '<|tool_call>call:sea{city:<|"|>Nice<|"|>}<tool_call|><|tool_response>', "Yes.<turn|>", "Sure.<turn|>",
    ],
}  # fmt: skip
# The same where each answer has a row by itself, so that no template has dropped its thought.
ALONE = {
    "qwen3": [f"<think>\nhm {i}\n</think>\n\n{part}" for i, part in enumerate((*QWEN2, "Sure.<|im_end|>"), 1)],
    "gpt-oss": [
        f"<|channel|>analysis<|message|>hm {i}<|end|><|start|>assistant{part.replace('Yes.<|end|>', 'Yes.<|return|>')}"
        for i, part in enumerate((*LEARNED["gpt-oss"][:3], "<|channel|>final<|message|>Sure.<|return|>"), 1)
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_the_assistant_says_is_learned_and_nothing_else(family, targets, tmp_path):
    target, tokenizer = targets(family)
    messages = session(family)
    (row,), _ = prompts_of(target, openai_row(messages), tmp_path / "all", supervised=True)
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=True, return_dict=True)["input_ids"]
    assert row["input_ids"] == expected
    assert learned(tokenizer, row) == LEARNED[family]
    if family in ALONE:
        rows, counts = prompts_of(target, openai_row(messages), tmp_path / "each", supervised=True, turns="each")
        assert [learned(tokenizer, row) for row in rows] == [[part] for part in ALONE[family]]
        assert all(row["input_ids"][: len(row["prompt_ids"])] == row["prompt_ids"] for row in rows)
        assert counts["rows_split"] == 3
        weighted = openai_row([*messages[:2], {**messages[2], "weight": 0}, *messages[3:]])
        rows, _ = prompts_of(target, weighted, tmp_path / "weighted", supervised=True, turns="each")
        assert [learned(tokenizer, row) for row in rows] == [[part] for part in ALONE[family][1:]]


# For which vLLM's `_detect_content_format` answers openai: the template gets the list itself.
LISTS = {"gemma-4", "glm-4.6", "granite-4.0", "kimi-k2", "minimax-m2", "qwen3.5"}


@pytest.mark.parametrize("family", FAMILIES)
def test_text_parts_are_joined_as_vllm_joins_them(family, targets, tmp_path):
    """By the template, if it reads lists, else by line breaks."""
    target, tokenizer = targets(family)
    parts = [{"type": "text", "text": text} for text in ("Go", "now?")]
    asked = {"messages": [{"role": "user", "content": parts}], "tools": TOOLS}
    (row,), _ = prompts_of(target, asked, tmp_path / "parts")
    served = [{"role": "user", "content": parts if family in LISTS else "Go\nnow?"}]
    options = {"tools": TOOLS, "add_generation_prompt": True, "tokenize": True, "return_dict": True}
    assert row["prompt_ids"] == tokenizer.apply_chat_template(served, **options)["input_ids"]


BARE = {
    "qwen3": '<tool_call>\n{"name": "sky", "arguments": {}}\n</tool_call><|im_end|>',
    "qwen3.5": "<tool_call>\n<function=sky>\n</function>\n</tool_call><|im_end|>",
}


@pytest.mark.parametrize("family", BARE)
def test_a_call_without_arguments_is_learned_behind_which_a_thought_was_dropped(family, targets, tmp_path):
    target, tokenizer = targets(family)
    messages = session(family)
    messages[5] = {**messages[5], "tool_calls": [{"function": {"name": "sky", "arguments": {}}}]}
    (row,), _ = prompts_of(target, openai_row(messages), tmp_path / "out", supervised=True)
    assert learned(tokenizer, row)[1] == BARE[family]


def test_ids_of_calls_are_cut_for_mistral_as_vllm_cuts_them(targets, tmp_path):
    target, tokenizer = targets("mistral-nemo")
    written = json.dumps(anthropic_row(session("mistral-nemo"))).replace("call0000", "toolu_01A09q90qwcall0000")
    (row,), _ = prompts_of(target, json.loads(written), tmp_path / "out", turns="last")
    expected = tokenizer.apply_chat_template(
        session("mistral-nemo")[:-1], tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert row["prompt_ids"] == expected["input_ids"] and row["turn"] == 4


CALLED = [
    {"role": "user", "content": "Go?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call(1, "sky", "Oslo")}]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "Blue."},
]
MADE = {"name": "sky", "arguments": '{"city": "Oslo"}'}
END = CALLED[3]
WRITTEN = {
    "LlamaFactory": {"conversations": [
        {"from": "human", "value": "Go?"}, {"from": "function_call", "value": json.dumps(MADE)},
        {"from": "observation", "value": "blue"}, {"from": "gpt", "value": "Blue."},
    ]},
    "ms-swift": {"messages": [
        CALLED[0], {"role": "tool_call", "content": json.dumps(MADE)}, {"role": "tool_response", "content": "blue"},
        END,
    ]},
    "OpenAI's older protocol": {"messages": [
        CALLED[0], {"role": "assistant", "content": None, "function_call": MADE},
        {"role": "function", "content": "blue"}, END,
    ]},
    "calls without a wrapper, as JSON text of the whole": {"trajectory": json.dumps([
        CALLED[0], {"role": "assistant", "tool_calls": [MADE]}, {"role": "tool", "content": "blue"}, END,
    ])},
    "SWE-agent": {"trajectory": [
        {"role": "system", "text": None, "system_prompt": "Be kind."}, {"role": "user", "text": "Go?"},
        {"role": "ai", "text": "", "tool_calls": [MADE]}, {"role": "tool", "text": "blue"},
        {"role": "ai", "text": "Blue."},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_are_read_however_they_are_written(form):
    expected = [dict(message) for message in CALLED]
    expected[1] = {**CALLED[1], "tool_calls": [{key: CALLED[1]["tool_calls"][0][key] for key in ("type", "function")}]}
    expected = [{"role": "system", "content": "Be kind."}] * (form == "SWE-agent") + expected
    chat = read_chat(WRITTEN[form], {})
    assert chat.messages == expected and not chat.ignored


def test_a_call_behind_a_text_belongs_to_it():
    turns = [{"from": "human", "value": "Go?"}, {"from": "gpt", "value": "I look."}]
    turns += [{"from": "function_call", "value": json.dumps([MADE, MADE])}, {"from": "observation", "value": "blue"}]
    answer = read_chat({"conversations": turns}, {}).messages[1]
    assert (answer["content"], len(answer["tool_calls"])) == ("I look.", 2)
    # vLLM and SGLang read a call without arguments as one with an empty object.
    for empty in ({}, {"arguments": ""}, {"arguments": None}):
        made = {"role": "assistant", "tool_calls": [{"function": {"name": "sky", **empty}}]}
        (read,) = read_chat({"messages": [CALLED[0], made]}, {}).messages[1]["tool_calls"]
        assert read["function"] == {"name": "sky", "arguments": {}}


NAMED = {"name": "sky"}
OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}


@pytest.mark.parametrize(
    ("written", "ignored"),
    [
        ({"function": NAMED, "arguments": json.dumps(OSLO)}, set()),
        ({"function": {**NAMED, "arguments": ""}, "args": OSLO}, set()),
        ({**NAMED, "arguments": OSLO, "args": json.dumps(OSLO)}, set()),
        ({**NAMED, "arguments": OSLO, "args": ROME}, {"args"}),
        ({"function": {**NAMED, "arguments": OSLO}, "arguments": ROME}, {"arguments"}),
        ({"function": {**NAMED, "parameters": OSLO, "input": ROME}, "index": 1}, {"input", "index"}),
    ],
)
def test_arguments_are_read_wherever_they_stand_and_others_counted(written, ignored):
    turns = [CALLED[0], {"role": "assistant", "content": "", "tool_calls": [written]}]
    chat = read_chat({"messages": turns}, {})
    (read,) = chat.messages[1]["tool_calls"]
    assert (read["function"]["name"], read["function"]["arguments"], chat.ignored) == ("sky", OSLO, ignored)
    with pytest.raises(RowError, match="a call of a tool has the function 'sky', expected an object"):
        openai_turns([{**turns[1], "tool_calls": [{"function": "sky"}]}])


def test_of_two_fields_that_say_something_else_one_is_counted():
    use = {"type": "tool_use", "id": "a", "name": "sky", "input": OSLO}
    langchain = {"id": "a", "type": "tool_call", "name": "sky", "args": OSLO}
    thinking = {"type": "thinking", "thinking": "hm"}
    for fields, ignored in (
        ({"reasoning_content": "hm", "thinking": "hm", "reasoning": " "}, set()),
        ({"reasoning_content": "hm", "thinking": "so"}, {"thinking"}),
        ({"reasoning_content": {"text": "hm"}, "reasoning": "so"}, {"reasoning_content"}),
        ({"content": [thinking], "reasoning_content": "hm"}, set()),
        ({"content": [thinking], "reasoning_content": "so"}, {"reasoning_content"}),
        ({"content": [thinking], "reasoning": "so"}, {"reasoning"}),
        ({"content": [use], "tool_calls": [langchain]}, set()),
        ({"content": [use], "tool_calls": [{**langchain, "args": ROME}]}, {"tool_calls"}),
        ({"content": "A", "value": "B"}, {"value"}),
        ({"content": "A", "weight": 1, "train": False}, {"train"}),
    ):
        turn = {"role": "assistant", "content": "A", **fields}
        assert read_chat({"messages": [CALLED[0], turn]}, {}).ignored == ignored, fields


def test_what_a_block_says_beside_its_text_is_counted_and_a_picture_is_refused():
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "is_error": True,
        "content": [{"type": "text", "text": text} for text in ("no", "way")],
    }
    said = {"type": "text", "text": "Again.", "cache_control": {"type": "ephemeral"}}
    redacted = {"type": "redacted_thinking", "data": "x"}
    blocks = [redacted, {"type": "tool_use", "id": "a", "name": "sky", "input": {}}]
    row = {
        "messages": [CALLED[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": [result, said]}]
    }
    chat = read_chat(row, {})
    assert chat.messages[2:] == [
        {"role": "tool", "content": "no\nway", "tool_call_id": "a"}, {"role": "user", "content": "Again."}
    ]  # fmt: skip
    assert chat.ignored == {"is_error", "cache_control", "redacted_thinking"}
    result["content"] += [{"type": "image", "source": {}}]
    with pytest.raises(RowError, match="text with image, expected text alone"):
        read_chat(row, {})
    with pytest.raises(RowError, match="a turn of calls is 'sky', expected JSON"):
        read_chat({"messages": [CALLED[0], {"role": "tool_call", "content": "sky"}]}, {})


def test_turns_that_are_too_long_are_left_out_of_their_session(targets, tmp_path):
    target, _ = targets("qwen3")
    row = openai_row(session("qwen3"))
    lengths = [len(made["prompt_ids"]) for made in prompts_of(target, row, tmp_path / "all")[0]]
    limit = {"max_length": lengths[1] + 1}
    with pytest.raises(InputError, match=f"found {lengths[2] + 1} tokens .one for an answer included., more than"):
        prompts_of(target, row, tmp_path / "error", **limit)
    rows, counts = prompts_of(target, row, tmp_path / "drop", overlong="drop", **limit)
    assert [len(made["prompt_ids"]) for made in rows] == lengths[:2]
    assert (counts["turns_beyond_context"], counts["rows_split"], counts.get("overlong_dropped", 0)) == (2, 1, 0)
    with pytest.raises(InputError, match=r"no rows left .read 1, kept 0, dropped 1: overlong 1"):
        prompts_of(target, row, tmp_path / "none", overlong="drop", max_length=9)


def test_the_bench_asks_the_turns_of_a_session_and_knows_their_numbers(targets, tmp_path):
    target, _ = targets("qwen3")
    rows, _ = prompts_of(target, openai_row(session("qwen3")), tmp_path / "made")
    for source, turns in ((tmp_path / "made", "last"), (tmp_path / "made.jsonl", "all")):
        asked = read_prompts(str(source), str(target), turns=turns)
        assert [(prompt.turn, prompt.prompt_ids) for prompt in asked] == [
            (row["turn"], row["prompt_ids"]) for row in rows
        ]
        assert len({prompt.id for prompt in asked}) == 4 and asked[0].template_inputs["tools"] == TOOLS
