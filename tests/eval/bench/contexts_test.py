"""Prompts of given lengths, against the conversations that they are cut from."""

from __future__ import annotations

import json

import pytest

from draftsmith.data.text.template import load_chat_tokenizer
from draftsmith.eval.bench.contexts import check_contexts, context_prompts
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.settings import BenchConfig
from draftsmith.launch.cli import main
from draftsmith.modules.types import InputError

TARGET = "embedded:target"
QUESTION = "Which of these functions adds?"
DOCUMENT = "\n".join(f"def f{i}(a, b):\n    return a + {i} * b\n" for i in range(60))
TALK = [
    message
    for i in range(20)
    for message in (
        {"role": "user", "content": f"Question {i}: " + "what is this " * (4 + i)},
        {"role": "assistant", "content": f"Answer {i}: a sum."},
    )
]
ROWS = [
    {"id": "short", "prompt": QUESTION},
    {"id": "document", "prompt": f"{DOCUMENT}\n{QUESTION}"},
    {"id": "talk", "messages": [{"role": "system", "content": "Be brief."}, *TALK, {"role": "user", "content": "End"}]},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture(scope="module")
def rows(source) -> list[BenchPrompt]:
    return read_prompts(source, TARGET, turns="last")


def test_prompts_have_the_lengths_and_are_text_of_their_rows(rows):
    tokenizer = load_chat_tokenizer(TARGET)
    files = context_prompts(rows, tokenizer, [400, 700], 0)
    assert [[prompt.task for prompt in file] for file in files] == [["400"] * 2, ["700"] * 2]
    assert [prompt.number for file in files for prompt in file] == [0, 1, 2, 3]
    for context, file in zip((400, 700), files, strict=True):
        for prompt in file:
            assert context <= len(prompt.prompt_ids) <= context + 8 and prompt.later == ()
            shown = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(prompt.prompt_ids) == shown
        document, talk = sorted(file, key=lambda prompt: prompt.id)
        (message,) = document.messages
        whole = ROWS[1]["prompt"]
        kept = next(n for n in range(len(whole)) if message["content"][: n + 1] != whole[: n + 1])
        assert message["content"].endswith(QUESTION) and whole.endswith(message["content"][kept:])
        # The conversation stops where the assistant spoke, and all but its longest message are as they were.
        recorded = ROWS[2]["messages"][: len(talk.messages)]
        assert talk.messages[-1]["role"] == "user" and talk.turn == len(talk.messages) // 2
        assert sum(ours != theirs for ours, theirs in zip(talk.messages, recorded, strict=True)) <= 1


def test_all_lengths_take_the_same_rows_and_no_more_rows_are_read(rows):
    read = []

    def reader():
        for row in [rows[0], rows[2], rows[1], rows[2]]:
            read.append(row.id)
            yield row

    files = context_prompts(reader(), load_chat_tokenizer(TARGET), [300, 700], 1)
    assert read == ["short", "talk"] and [[prompt.id for prompt in file] for file in files] == [["talk"], ["talk"]]
    # Of rows that are long enough for some lengths only, the longest come first.
    length = len(rows[1].prompt_ids) + 1
    files = context_prompts(rows, load_chat_tokenizer(TARGET), [300, length], 1)
    assert len(rows[2].prompt_ids) >= length and [file[0].id for file in files] == ["talk", "talk"]


def test_what_cannot_be_is_refused_in_one_line(rows, source, capsys, tmp_path):
    with pytest.raises(InputError, match=r"no prompt of 8k in 3 rows, the longest of [\d,]+ tokens.*Leave 8k out"):
        context_prompts(rows, load_chat_tokenizer(TARGET), [300, 8192], 0)
    with pytest.raises(InputError, match=r"512 tokens, and 64 of an answer, expected at most 575 together.*the x head"):
        check_contexts([256, 512], 64, "the x head", 575)
    check_contexts([256, 512], 64, "the x head", 576)
    other = BenchPrompt("other", [*rows[1].prompt_ids, 5], "", rows[1].messages)
    with pytest.raises(InputError, match="prompt other in another chat template"):
        context_prompts([other], load_chat_tokenizer(TARGET), [300], 0)
    options = ["--target", TARGET, "--output", str(tmp_path / "x"), "--methods", "pld"]
    for given, message in (
        (["--prompts", source, "--contexts", "1k"], "1,024 tokens, and 128 of an answer"),
        (["--prompts", source, "--contexts", "1k,x"], "numbers separated by commas"),
        (["--tasks", source, "--contexts", "1k"], "Pass them in place of --tasks"),
    ):
        assert main(["eval", "bench", *options, *given]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "x" / "results.json").exists()
    assert BenchConfig(TARGET, prompts=source, contexts="16k,1000, 4K", output=tmp_path).lengths == [1000, 4096, 16384]
