"""Conversations answered turn by turn, against transformers and the chat template, one turn at a time."""

from __future__ import annotations

import asyncio
import datetime
import json

import pytest
import torch
from chats import (
    ASSISTANT,
    CHATML,
    HARMONY,
    LLAMA3,
    MAX_NEW,
    MISTRAL,
    NUM_ROWS,
    REWRITES,
    SYSTEM,
    TARGET,
    TOOL,
    USER,
    chat,
    chat_model,
    chat_tokenizer,
    conversation,
    counts_of,
    make_prompts,
    make_responses,
    rows_of,
)
from servers import completion
from transformers import AutoTokenizer

from draftsmith.data import prompts
from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.server import Server
from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import STARTED, Manifest
from draftsmith.data.store.shards import account
from draftsmith.data.text.answers import spans
from draftsmith.data.text.conversations import Chat, open_turns, read_chat
from draftsmith.data.text.template import RowError, prompt_ids
from draftsmith.data.text.turns import Conversation, TargetTurn, turns_tokenizer
from draftsmith.eval.bench.prompts import BenchPrompt, next_turn
from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError, SamplingParams

# A conversation, the setting, what is asked first, what follows each answer, and how many turns nobody answers.
ASKED = [
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "all", "a", ["c"], 0),
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "first", "a", [], 1),
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "last", "abc", [], 1),
    (chat((SYSTEM, "s"), (USER, "a"), (ASSISTANT, "b"), (SYSTEM, "t"), (USER, "c")), "all", "sa", ["tc"], 0),
    (chat((ASSISTANT, "x"), (USER, "a"), (USER, "b"), (ASSISTANT, "c")), "all", "a", ["b"], 0),
    (chat((USER, "a"), (SYSTEM, "s")), "all", "a", [], 0),
]


@pytest.mark.parametrize(("messages", "turns", "opening", "later", "not_asked"), ASKED)
def test_every_user_turn_is_asked_and_the_recorded_answers_are_left_out(messages, turns, opening, later, not_asked):
    (found,) = open_turns(Chat(messages), turns)
    said = ["".join(message["content"] for message in part) for part in (found.opening, *found.later)]
    assert (said[0], said[1:], found.not_asked) == (opening, later, not_asked)


# Without results of tools, every answer is recorded; with them, the target's own call has none that fits it.
LOOP = chat((USER, "a"), (ASSISTANT, "b"), (TOOL, "t"), (TOOL, "u"), (ASSISTANT, "c"), (SYSTEM, "s"), (USER, "d"))
BY_ITSELF = [
    (LOOP, "all", ["a", "abtu", "abtucsd"], [1, 2, 3], 0),
    (LOOP, "last", ["abtucsd"], [3], 2),
    (LOOP[:5], "last", ["abtu"], [2], 1),
    (LOOP[:3], "last", ["abt"], [2], 1),
    (LOOP[:5], "first", ["a"], [1], 0),
    (chat((ASSISTANT, "x"), (USER, "a"), (USER, "b"), (ASSISTANT, "c")), "each", ["xab"], [2], 0),
    (chat((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "d")), "each", ["a", "abc"], [1, 2], 0),
]


@pytest.mark.parametrize(("messages", "turns", "openings", "numbers", "not_asked"), BY_ITSELF)
def test_a_turn_behind_recorded_ones_is_asked_by_itself(messages, turns, openings, numbers, not_asked):
    found = open_turns(Chat(messages), turns)
    assert ["".join(message["content"] for message in turn.opening) for turn in found] == openings
    assert [turn.turn for turn in found] == numbers and not any(turn.later for turn in found)
    assert sum(turn.not_asked for turn in found) == not_asked


def test_rows_of_one_session_are_one_conversation(talks, tmp_path):
    """A validation split must not part them."""
    for turns, number in (("each", 13), ("last", NUM_ROWS)):
        asked = make_prompts(talks, tmp_path / turns, turns=turns)
        made = make_responses(asked, tmp_path / f"{turns}-answered", max_new_tokens=3)
        rows = rows_of(made)
        assert [row["turn"] for row in rows] == [row["turn"] for row in rows_of(asked)] and len(rows) == number
        sessions = [int(row["id"].split("/")[0].removeprefix("row-")) for row in rows]
        assert open_dataset(made).conversations.tolist() == sessions and max(sessions) == NUM_ROWS - 1


def test_turns_of_fastchat_are_all_asked_and_an_empty_one_is_the_rows_fault():
    three = read_chat({"turns": ["a", "b", "c"]}, {})
    assert [part[0]["content"] for part in open_turns(three, "all")[0].later] == ["b", "c"]
    assert open_turns(three, "last")[0].not_asked == 2  # only the first turn has no unanswered one before it
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
        return completion(load_tokenizer(TARGET), body["prompt"], ids, lm.info.eos_ids)

    monkeypatch.setattr(Server, "ask", reply)
    made = rows_of(make_responses(asked, tmp_path / "out", engine="openai"))
    for ours, theirs in zip(made, rows_of(answered), strict=True):
        for name in ("id", "input_ids", "loss_mask", "turn", "ended"):
            assert ours[name] == theirs[name]
    assert len(seen) == counts_of(answered)["answers"]
    assert len({body["seed"] for _, body in seen}) == len(seen)


# -- later turns, with templates like public ones


ASK = chat((USER, "Q"))


def talk_of(tokenizer, later: list[list[dict]]) -> Conversation:
    ids = prompt_ids(tokenizer, ASK)
    row = {"id": "a", "prompt_ids": ids, "messages": json.dumps(ASK), "task": "", "later": json.dumps(later)}
    return Conversation(row, tokenizer, 2048)


# Template, end token, later messages, sampled answers, and what is asked after each.
BEHIND = "<|end|><|start|>user<|message|>Q<|end|><|start|>assistant"
CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A"
TURNS = {
    "channels": (
        HARMONY, [ASK, ASK], [CHANNELS + "<|return|>", "<|channel|>final<|message|>B<|return|>"],
        [CHANNELS + BEHIND, "<|channel|>final<|message|>B" + BEHIND],
    ),
    # The second answer has no structure; the first one keeps its own.
    "channels, then plain text": (
        HARMONY, [ASK, ASK], [CHANNELS + "<|return|>", "B<|return|>"],
        [CHANNELS + BEHIND, "B" + BEHIND],
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
    talk = talk_of(tokenizer, later)
    text = tokenizer.decode(talk.prompt)
    prompt = BenchPrompt("a", talk.prompt, messages=tuple(ASK), later=tuple(m[0]["content"] for m in later))
    for answer, behind in zip(answers, asked, strict=True):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        talk.add_answer(TargetTurn(ids, True))
        text += behind
        assert tokenizer.decode(talk.prompt) == text and not talk.counts.keys() - {"rows_split"}
        # The bench shows them alike.
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
    talk = Conversation(rows[0], turns_tokenizer(Checkpoint(target), manifest, None), 2048)
    ids = chat_tokenizer(LLAMA3)("A<|eot|>", add_special_tokens=False)["input_ids"]
    talk.add_answer(TargetTurn(ids, True))
    assert talk.prompt[: len(rows[0]["prompt_ids"]) + len(ids)] == [*rows[0]["prompt_ids"], *ids]
