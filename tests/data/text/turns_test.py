"""Conversations answered turn by turn, against transformers and the chat template, one turn at a time."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import AutoTokenizer
from turn_taking import (
    ASSISTANT,
    MAX_NEW,
    NUM_ROWS,
    REWRITES,
    SYSTEM,
    TARGET,
    TOOL,
    USER,
    chat,
    conversation,
    counts_of,
    make_prompts,
    make_responses,
    rows_of,
)

from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.server import Server
from draftsmith.data.store.shards import account
from draftsmith.data.text.answers import spans
from draftsmith.data.text.conversations import Chat, open_turns, read_chat
from draftsmith.data.text.template import RowError
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.pretrained.tokenizers import load_tokenizer
from draftsmith.modules.types import InputError, SamplingParams

# A conversation, the setting, what is asked first, what follows each answer, and how many turns nobody answers.
ASKED = [
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "all", "a", ["c"], 0),
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "first", "a", [], 1),
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "last", "abc", [], 1),
    (chat((SYSTEM, "s"), (USER, "a"), (ASSISTANT, "b"), (SYSTEM, "t"), (USER, "c")), "all", "sa", ["tc"], 0),
    (chat((ASSISTANT, "x"), (USER, "a"), (USER, "b"), (ASSISTANT, "c")), "all", "a", ["b"], 0),
    (chat((USER, "a"), (ASSISTANT, "b"), (TOOL, "t"), (ASSISTANT, "c"), (USER, "d")), "all", "a", ["t", "d"], 0),
    (chat((USER, "a"), (ASSISTANT, "b"), (TOOL, "t"), (USER, "d")), "all", "a", ["td"], 0),
    (chat((USER, "a"), (SYSTEM, "s")), "all", "a", [], 0),
]


@pytest.mark.parametrize(("messages", "turns", "opening", "later", "not_asked"), ASKED)
def test_every_user_turn_is_asked_and_the_recorded_answers_are_left_out(messages, turns, opening, later, not_asked):
    found = open_turns(Chat(messages), turns)
    said = ["".join(message["content"] for message in part) for part in (found.opening, *found.later)]
    assert (said[0], said[1:], found.not_asked) == (opening, later, not_asked)


def test_turns_of_fastchat_are_all_asked_and_an_empty_one_is_the_rows_fault():
    three = read_chat({"turns": ["a", "b", "c"]}, {})
    assert [part[0]["content"] for part in open_turns(three, "all").later] == ["b", "c"]
    assert open_turns(three, "last").not_asked == 2  # only the first turn has no unanswered one before it
    with pytest.raises(RowError, match="a later turn has no text"):
        open_turns(read_chat({"turns": ["a", " "]}, {}), "all")
    with pytest.raises(RowError, match="no user turn"):
        open_turns(Chat(chat((SYSTEM, "s"))), "all")


def test_prompts_hold_the_later_turns_and_count_them(asked, talks, tmp_path):
    assert counts_of(asked)["later_turns"] == 6 and counts_of(asked)["turns_not_asked"] == 0
    row = rows_of(asked)[2]
    assert [message["role"] for said in json.loads(row["later"]) for message in said] == [USER, USER]
    for turns, left in (("first", 6), ("last", 6)):
        directory = make_prompts(talks, tmp_path / turns, turns=turns)
        counts = counts_of(directory)
        assert (counts["later_turns"], counts["turns_not_asked"]) == (0, left)
    last = json.loads(rows_of(tmp_path / "last")[2]["messages"])
    assert last == conversation(2)[:-1]  # the recorded answers are the context


def test_every_answer_is_what_the_target_says_to_the_conversation_so_far(answered, oracle, tokenizer):
    answers: dict[str, list] = {}
    for row in rows_of(answered):
        with torch.inference_mode():
            choices = oracle(torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        own = [(row, choices, start, end) for start, end in spans(row["loss_mask"])]
        answers.setdefault(row["id"].split("/")[0], []).extend(own)
    lengths = []
    for number in range(NUM_ROWS):
        messages, own = [], iter(answers[f"row-{number}"])
        for message in conversation(number):
            if message["role"] != ASSISTANT:
                messages.append(message)
                continue
            row, choices, start, end = next(own)
            ids = row["input_ids"]
            # What was shown is the template's own text of the conversation with the target's answers.
            shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert ids[:start] == tokenizer(shown, add_special_tokens=False)["input_ids"]
            assert ids[start:end] == choices[start - 1 : end - 1]
            assert tokenizer.eos_token_id not in ids[start : end - 1]
            said = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            messages.append({"role": ASSISTANT, "content": said})
            lengths.append(end - start)
            if ids[end - 1] != tokenizer.eos_token_id:  # cut: the conversation is over
                assert end - start == MAX_NEW and end == len(ids) and not row["ended"]
                break
        assert next(own, None) is None
    counts = counts_of(answered)
    assert counts["answers"] == len(lengths) > NUM_ROWS and counts["response_tokens"] == sum(lengths)


def test_a_row_depends_on_its_number_and_turn_only_and_a_lost_shard_comes_back(asked, tmp_path):
    sampled = {"temperature": 1.0, "max_new_tokens": 24}
    first = make_responses(asked, tmp_path / "a", **sampled, rows_per_shard=2)
    other = make_responses(asked, tmp_path / "b", **sampled, rows_per_shard=16, batch_size=1)
    assert rows_of(first) == rows_of(other)
    before = {path.name: file_sha256(path) for path in first.glob("*.parquet")}
    for name in ("manifest.json", "shard-00001.done.json", "shard-00001.parquet"):
        (first / name).unlink()
    make_responses(asked, first, **sampled, rows_per_shard=2)
    assert before == {path.name: file_sha256(path) for path in first.glob("*.parquet")}


# As Qwen3's template drops the thinking of earlier turns: of an answer that is not the last, only what is behind the
# first line is shown.
def test_a_template_that_rewrites_history_gives_a_row_a_turn_with_what_is_shown(rewritten, oracle, tokenizer):
    rows = rows_of(rewritten[1])
    assert counts_of(rewritten[1])["rows_split"] == len(rows) - NUM_ROWS > 2
    assert account(counts_of(rewritten[1])) == f"read 7, kept 7 in {len(rows)} rows, dropped 0"
    by_id = {row["id"]: row for row in rows}
    first, second = by_id["row-1"], by_id["row-1/turn-2"]
    assert (first["turn"], second["turn"]) == (1, 2)
    said = tokenizer.decode(first["input_ids"][first["loss_mask"].index(True) :], skip_special_tokens=True)
    users = [message for message in conversation(1) if message["role"] == USER]
    messages = [users[0], {"role": ASSISTANT, "content": said}, users[1]]
    shown = tokenizer.apply_chat_template(messages, chat_template=REWRITES, add_generation_prompt=True, tokenize=False)
    ids, start = second["input_ids"], second["loss_mask"].index(True)
    assert ids[:start] == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert second["loss_mask"] == [at >= start for at in range(len(ids))]
    with torch.inference_mode():
        assert oracle(torch.tensor([ids])).logits[0].argmax(-1).tolist()[start - 1 : -1] == ids[start:]


def test_the_template_of_the_prompts_is_needed_for_later_turns(rewritten, talks, tmp_path):
    path = tmp_path / "moved.jinja"
    path.write_text(REWRITES)
    asked = make_prompts(talks, tmp_path / "prompts", chat_template=path)
    own = tmp_path / "own.jinja"
    own.write_text(AutoTokenizer.from_pretrained(model_directory(TARGET)).chat_template)
    plain = make_prompts(talks, tmp_path / "plain", chat_template=own)
    own.unlink()
    assert counts_of(make_responses(plain, tmp_path / "by-own", max_new_tokens=3))["answers"] == NUM_ROWS
    path.rename(tmp_path / "elsewhere.jinja")
    with pytest.raises(InputError, match=r"chat_template: found .*moved.jinja.*Pass --chat-template FILE"):
        make_responses(asked, tmp_path / "out")
    (tmp_path / "other.jinja").write_text(REWRITES + " ")
    with pytest.raises(InputError, match=r"chat_template: found \w+ of .*other.jinja, expected the prompts'"):
        make_responses(asked, tmp_path / "out", chat_template=tmp_path / "other.jinja")
    made = make_responses(asked, tmp_path / "out", chat_template=tmp_path / "elsewhere.jinja")
    assert rows_of(made) == rows_of(rewritten[1])


def test_turns_that_are_not_asked_are_counted_by_reason(talks, asked, tmp_path):
    cut = make_responses(asked, tmp_path / "cut", max_new_tokens=3)
    assert counts_of(cut)["turns_after_cut_answer"] == 6 and counts_of(cut)["answers"] == NUM_ROWS
    short = make_prompts(talks, tmp_path / "short", max_length=100)
    full = make_responses(short, tmp_path / "full")
    rows, counts = rows_of(full), counts_of(full)
    assert counts["turns_beyond_context"] > 0
    assert all(start < 100 for row in rows for start, _ in spans(row["loss_mask"]))
    template = tmp_path / "once.jinja"
    template.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('once') }}{% endif %}" + REWRITES.replace("[1:]", "[:]")
    )
    asked_once = make_prompts(talks, tmp_path / "once", chat_template=template)
    assert counts_of(make_responses(asked_once, tmp_path / "refused"))["turns_refused_by_template"] == 6


def test_a_server_is_asked_turn_by_turn(answered, asked, tmp_path, monkeypatch):
    lm, seen = load_lm(TARGET), []

    async def reply(self, path, body):
        await asyncio.sleep(0)
        seen.append((path, body))
        ids = generate_all(lm, [body["prompt"]], SamplingParams(), body["max_tokens"], 32)[0]
        text = load_tokenizer(TARGET).decode(ids, skip_special_tokens=True)
        reason = "stop" if ids[-1] in lm.info.eos_ids else "length"
        return {"choices": [{"text": text, "finish_reason": reason, "token_ids": ids}]}

    monkeypatch.setattr(Server, "ask", reply)
    made = rows_of(make_responses(asked, tmp_path / "out", engine="openai"))
    for ours, theirs in zip(made, rows_of(answered), strict=True):
        for name in ("id", "input_ids", "loss_mask", "turn", "ended"):
            assert ours[name] == theirs[name]
    assert len(seen) == counts_of(answered)["answers"]
    assert len({body["seed"] for _, body in seen}) == len(seen)
