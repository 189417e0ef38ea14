"""Prompts of given lengths, against the conversations that they are cut from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.lengths import cut_to
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.launch.cli import main

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
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_prompts_have_the_lengths_and_are_text_of_their_rows(source, tmp_path, capsys):
    manifest = Manifest.read(run(PromptsConfig(str(source), TARGET, tmp_path / "prompts", length="700,400")))
    assert "read 3, kept 2 in 4 rows, dropped 1: not cut 1" in capsys.readouterr().out
    assert (manifest.counts["of_400"], manifest.counts["of_700"]) == (2, 2)
    tokenizer, rows = load_chat_tokenizer(TARGET), list(Rows(manifest).iterate())
    assert [row["id"] for row in rows] == [f"{name}/{length}" for name in ("document", "talk") for length in (400, 700)]
    for row in rows:
        context, messages = int(row["task"]), json.loads(row["messages"])
        assert context <= len(row["prompt_ids"]) <= context + 8 and row["later"] == "[]"
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(row["prompt_ids"]) == shown
        if row["id"].startswith("document"):
            (message,), whole = messages, ROWS[1]["prompt"]
            kept = next(n for n in range(len(whole)) if message["content"][: n + 1] != whole[: n + 1])
            assert message["content"].endswith(QUESTION) and whole.endswith(message["content"][kept:])
        else:
            # The conversation stops where the assistant spoke, and all but its longest message are as they were.
            recorded = ROWS[2]["messages"][: len(messages)]
            assert messages[-1]["role"] == "user" and row["turn"] == len(messages) // 2
            assert sum(ours != theirs for ours, theirs in zip(messages, recorded, strict=True)) <= 1


def test_a_row_is_cut_to_its_own_length_and_no_further(source):
    tokenizer, messages = load_chat_tokenizer(TARGET), ROWS[2]["messages"]
    whole = prompt_ids(tokenizer, messages)
    made = cut_to(tokenizer, messages, {}, len(whole))
    assert made is not None and len(made[0]) == len(messages) and len(made[1]) == len(whole)
    assert cut_to(tokenizer, messages, {}, len(whole) + 1) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--length", "8k"], "8,192, expected fewer tokens than"),
        (["--length", "8k", "--max-length", "9000"], "no rows left (read 3, kept 0, dropped 3: not cut 3)"),
        (["--length", "1k,x"], "numbers separated by commas"),
        (["--length", "400", "--supervised"], "none: a prompt ends where its row does"),
        (["--length", "400", "--turns", "each"], "none: a prompt ends where its row does"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(source, tmp_path, capsys, words, said):
    options = ["--source", str(source), "--target", TARGET, "--output", str(tmp_path / "x")]
    assert main(["data", "prompts", *options, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and not (tmp_path / "x" / "manifest.json").exists()
    assert PromptsConfig("a", "b", tmp_path, length="16k,1000, 4K").lengths == [1000, 4096, 16384]
