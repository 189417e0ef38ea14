"""Conversations answered turn by turn, against transformers and the chat template, one turn at a time; and all that is
made of them: features, labels, what a training counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data import acceptance, features, prompts, responses
from draftsmith.data.answering.batched import answer
from draftsmith.data.answering.server import ServerConfig, ServerEngine
from draftsmith.data.inspect import InspectConfig
from draftsmith.data.inspect import run as inspect
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import AcceptanceDataset, FeatureDataset, ResponsesDataset, in_pieces
from draftsmith.data.store.manifest import Manifest, file_sha256
from draftsmith.data.store.rollout_dataset import RolloutDataset
from draftsmith.data.store.shards import Rows, account
from draftsmith.data.text.answers import Supervision, answer_lengths, answer_mask, conversation_numbers, spans
from draftsmith.data.text.conversations import Conversation, asked_of, recognise
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.drafters.eagle.head import LOOKAHEAD
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.fit import split
from draftsmith.train.planning.documents import documents_of

TARGET = "embedded:draft-small"  # a trained model of one layer: it ends its answers, and is fast
FUNCTIONS = [
    "def area(width: int, height: int) -> int:\n    return width * height",
    "def add(first, second):\n    return first + second",
    "def total(values: list) -> int:\n    s = 0\n    for value in values:\n        s += value\n    return s",
]
WISHES = ["Remove the type hints:\n\n", "Add a docstring:\n\n", "Rename the function to work:\n\n"]
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
MAX_NEW = 60


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def conversation(number: int) -> list[dict[str, str]]:
    """One to three turns, with answers that the target would not give; some begin with a system message."""
    messages = chat((SYSTEM, "Be brief.")) if number % 4 == 3 else []
    for turn in range(1 + number % 3):
        wish = WISHES[(number + turn) % 3] + FUNCTIONS[(number // 3 + turn) % 3]
        messages += chat((USER, wish), (ASSISTANT, f"As you wish, {turn}."))
    return messages


NUM_ROWS = 7


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    rows = [{"id": f"row-{i}", "messages": conversation(i), "task": "edit"} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_prompts(source: Path, output: Path, **settings) -> Path:
    return prompts.run(prompts.PromptsConfig(str(source), TARGET, output, **settings))


def make_responses(asked: Path, output: Path, **settings) -> Path:
    own = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "rows_per_shard": 3, "batch_size": 2, "num_threads": 1}
    return responses.run(responses.ResponsesConfig(asked, TARGET, output, **{**own, **settings}))


def rows_of(directory: Path) -> list[dict]:
    return Rows(directory, Manifest.read(directory)).read(0, 99)


def counts_of(directory: Path) -> dict[str, int]:
    return Manifest.read(directory).counts


@pytest.fixture(scope="module")
def asked(source, tmp_path_factory) -> Path:
    return make_prompts(source, tmp_path_factory.mktemp("prompts") / "out")


@pytest.fixture(scope="module")
def answered(asked, tmp_path_factory) -> Path:
    return make_responses(asked, tmp_path_factory.mktemp("responses") / "out")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_directory(TARGET))


@pytest.fixture(scope="module")
def oracle():
    return AutoModelForCausalLM.from_pretrained(model_directory(TARGET), dtype=torch.float32).eval()


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
    found = asked_of(Conversation(messages), turns)
    said = ["".join(message["content"] for message in part) for part in (found.opening, *found.later)]
    assert (said[0], said[1:], found.not_asked) == (opening, later, not_asked)


def test_turns_of_fastchat_are_all_asked_and_an_empty_one_is_the_rows_fault():
    row = {"turns": ["a", "b", "c"]}
    layout = recognise(list(row), row, {})
    assert [part[0]["content"] for part in asked_of(layout.conversation(row), "all").later] == ["b", "c"]
    assert asked_of(layout.conversation(row), "last").not_asked == 2  # its first turn is all that can be asked so
    with pytest.raises(RowError, match="a later turn has no text"):
        asked_of(layout.conversation({"turns": ["a", " "]}), "all")
    with pytest.raises(RowError, match="no user turn"):
        asked_of(Conversation(chat((SYSTEM, "s"))), "all")


def test_prompts_hold_the_later_turns_and_count_them(asked, source, tmp_path):
    assert counts_of(asked)["later_turns"] == 6 and counts_of(asked)["turns_not_asked"] == 0
    row = rows_of(asked)[2]
    assert [message["role"] for said in json.loads(row["later"]) for message in said] == [USER, USER]
    for turns, left in (("first", 6), ("last", 6)):
        directory = make_prompts(source, tmp_path / turns, turns=turns)
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


def test_the_mask_is_between_the_assistants_tag_and_the_end_token(answered, tokenizer):
    begin, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.eos_token_id
    several = 0
    for row in rows_of(answered):
        speaking, mask = False, []
        for token in row["input_ids"]:
            mask.append(speaking)
            speaking = token == begin or (speaking and token != end)
        # A row that goes on with a conversation has the answers before it in its prompt.
        assert row["loss_mask"] == [bit and at >= row["prompt_length"] for at, bit in enumerate(mask)]
        assert row["loss_mask"][row["prompt_length"]]
        several += len(spans(row["loss_mask"])) > 1
    assert several >= 2


def test_features_of_a_row_are_those_of_its_tokens(answered, oracle, tmp_path):
    config = features.FeaturesConfig(answered, TARGET, tmp_path / "out", rows_per_shard=3, num_threads=1)
    data = FeatureDataset(features.run(config))
    for item, row in zip(data, rows_of(answered), strict=True):
        with torch.inference_mode():
            expected = oracle.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]
        # bf16 keeps 8 bits of the mantissa.
        torch.testing.assert_close(item["features"].float(), expected, rtol=2**-8, atol=1e-2)
        assert item["loss_mask"].tolist() == row["loss_mask"]
    texts = ResponsesDataset(answered, TARGET, load_lm(TARGET).info.identity)
    assert [item["loss_mask"].tolist() for item in texts] == [row["loss_mask"] for row in rows_of(answered)]


def test_labels_are_on_answer_tokens_of_every_turn(answered, tmp_path):
    config = acceptance.AcceptanceConfig(answered, TARGET, tmp_path / "out", "embedded:draft", num_threads=1)
    rows = rows_of(acceptance.run(config))
    target, draft = load_lm(TARGET), load_lm("embedded:draft")
    for row in rows:
        whole = torch.tensor([row["input_ids"]])
        q = draft.lm_head(draft.features(whole))[0].softmax(-1)
        p = target.lm_head(target.features(whole))[0].softmax(-1)
        places = [at for start, end in spans(row["loss_mask"]) for at in range(start, end)]
        assert len(places) == len(row["draft_ids"]) == sum(row["loss_mask"])
        # The responses are greedy, so one-hot laws: Y is the draft's choice, kept where it is the target's.
        assert row["draft_ids"] == [int(q[at - 1].argmax()) for at in places]
        assert row["accept_prob"] == [float(q[at - 1].argmax() == p[at - 1].argmax()) for at in places]
    data = AcceptanceDataset(config.output, mix=0.3)
    for i, row in enumerate(rows):
        item = data.item(i, 0)
        drafted, mask = item["loss_mask"], torch.tensor(row["loss_mask"])
        assert not (drafted & ~mask).any()
        order = torch.cumsum(mask, 0) - 1
        assert item["z_ids"][drafted].tolist() == [row["draft_ids"][at] for at in order[drafted].tolist()]
        assert item["z_ids"][~drafted].tolist() == torch.tensor(row["input_ids"])[~drafted].tolist()


def test_drafts_of_rollouts_begin_within_answers(answered, tmp_path):
    config = acceptance.AcceptanceConfig(
        answered, TARGET, tmp_path / "out", "embedded:draft", labels="rollout", depth=3, stride=2, num_threads=1
    )
    rows = rows_of(acceptance.run(config))
    starts = {(row["id"], start) for row in rows for start in row["starts"]}
    allowed = {
        (row["id"], at)
        for row in rows_of(answered)
        for start, end in spans(row["loss_mask"])
        for at in range(start + 1, end)
    }
    assert starts <= allowed
    beyond_first = [(row["id"], spans(row["loss_mask"])[0][1]) for row in rows]
    assert any(start >= first for name, first in beyond_first for other, start in starts if other == name)
    assert RolloutDataset(config.output).answers.lengths(range(len(rows))).sum() == sum(
        sum(row["loss_mask"]) for row in rows
    )


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
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{{ m.content.split('\n')[1:] | join('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def rewritten(source, tmp_path_factory) -> tuple[Path, Path]:
    """A template that rewrites earlier answers, and responses by it."""
    root = tmp_path_factory.mktemp("rewritten")
    (root / "template.jinja").write_text(REWRITES)
    asked = make_prompts(source, root / "prompts", chat_template=root / "template.jinja")
    return root / "template.jinja", make_responses(asked, root / "responses")


def test_a_template_that_rewrites_history_gives_a_row_a_turn_with_what_is_shown(rewritten, oracle, tokenizer):
    rows = rows_of(rewritten[1])
    assert counts_of(rewritten[1])["rows_split"] == len(rows) - NUM_ROWS > 2
    assert account(counts_of(rewritten[1])) == f"read 7, kept 7 in {len(rows)} rows, dropped 0"
    by_id = {row["id"]: row for row in rows}
    first, second = by_id["row-1"], by_id["row-1/turn-2"]
    assert (first["turn"], second["turn"]) == (1, 2)
    said = tokenizer.decode(first["input_ids"][first["prompt_length"] :], skip_special_tokens=True)
    users = [message for message in conversation(1) if message["role"] == USER]
    messages = [users[0], {"role": ASSISTANT, "content": said}, users[1]]
    shown = tokenizer.apply_chat_template(messages, chat_template=REWRITES, add_generation_prompt=True, tokenize=False)
    ids, start = second["input_ids"], second["prompt_length"]
    assert ids[:start] == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert second["loss_mask"] == [at >= start for at in range(len(ids))]
    with torch.inference_mode():
        assert oracle(torch.tensor([ids])).logits[0].argmax(-1).tolist()[start - 1 : -1] == ids[start:]


def test_rows_of_a_conversation_stay_on_one_side_of_the_validation_split(rewritten, tmp_path):
    directory = rewritten[1]
    data = ResponsesDataset(directory, TARGET, load_lm(TARGET).info.identity)
    names = [row["id"].split("/")[0] for row in rows_of(directory)]
    pieces = in_pieces(data, 40, LOOKAHEAD)
    for dataset, owner in ((data, names), (pieces, [names[row] for row in pieces.rows])):
        config = TrainConfig(data=directory, output=tmp_path, val_share=0.4, max_length=0 if dataset is data else 40)
        train, val = split(config, data, None, 4096, LOOKAHEAD)
        sides = [{owner[i] for i in side.indices} for side in (train, val)]
        assert sides[0] | sides[1] == set(names) and not sides[0] & sides[1]
        # What `plan` expects is what is trained on.
        assert documents_of(config, "responses", 4096, 0, 0).lengths == train.lengths


def test_the_template_of_the_prompts_is_needed_for_later_turns(rewritten, source, tmp_path):
    path = tmp_path / "moved.jinja"
    path.write_text(REWRITES)
    asked = make_prompts(source, tmp_path / "prompts", chat_template=path)
    own = tmp_path / "own.jinja"
    own.write_text(AutoTokenizer.from_pretrained(model_directory(TARGET)).chat_template)
    plain = make_prompts(source, tmp_path / "plain", chat_template=own)
    own.unlink()
    assert counts_of(make_responses(plain, tmp_path / "by-own", max_new_tokens=3))["answers"] == NUM_ROWS
    path.rename(tmp_path / "elsewhere.jinja")
    with pytest.raises(InputError, match=r"chat_template: found nothing at .*moved.jinja.*Pass --chat-template FILE"):
        make_responses(asked, tmp_path / "out")
    (tmp_path / "other.jinja").write_text(REWRITES + " ")
    with pytest.raises(InputError, match=r"chat_template: found \w+, expected the prompts' template, \w+"):
        make_responses(asked, tmp_path / "out", chat_template=tmp_path / "other.jinja")
    made = make_responses(asked, tmp_path / "out", chat_template=tmp_path / "elsewhere.jinja")
    assert rows_of(made) == rows_of(rewritten[1])


def test_turns_that_are_not_asked_are_counted_by_reason(source, asked, tmp_path):
    cut = make_responses(asked, tmp_path / "cut", max_new_tokens=3)
    assert counts_of(cut)["turns_after_cut_answer"] == 6 and counts_of(cut)["answers"] == NUM_ROWS
    short = make_prompts(source, tmp_path / "short", max_length=100)
    full = make_responses(short, tmp_path / "full")
    rows, counts = rows_of(full), counts_of(full)
    assert counts["turns_beyond_context"] > 0
    assert all(start < 100 for row in rows for start, _ in spans(row["loss_mask"]))
    template = tmp_path / "once.jinja"
    template.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('once') }}{% endif %}" + REWRITES.replace("[1:]", "[:]")
    )
    asked_once = make_prompts(source, tmp_path / "once", chat_template=template)
    assert counts_of(make_responses(asked_once, tmp_path / "refused"))["turns_refused_by_template"] == 6


def test_end_tokens_can_be_ignored(asked, tmp_path):
    rows = rows_of(make_responses(asked, tmp_path / "out", ignore_eos=True, max_new_tokens=40))
    assert {sum(row["loss_mask"]) for row in rows} == {40} and not any(row["ended"] for row in rows)
    ended = load_lm(TARGET).info.eos_ids[0]
    assert any(ended in row["input_ids"][row["prompt_length"] : -1] for row in rows)


def test_a_server_is_asked_turn_by_turn(answered, asked, tmp_path, monkeypatch):
    lm, seen = load_lm(TARGET), []

    async def reply(self, client, request):
        await asyncio.sleep(0)
        seen.append(request)
        body = request[1]
        ids = answer(lm, [body["prompt"]], self.params, body["max_tokens"], None)[0]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        reason = "stop" if ids[-1] in lm.info.eos_ids else "length"
        return {"choices": [{"text": text, "finish_reason": reason, "token_ids": ids}]}

    monkeypatch.setattr(ServerEngine, "_ask", reply)
    made = rows_of(make_responses(asked, tmp_path / "out", engine="openai"))
    for ours, theirs in zip(made, rows_of(answered), strict=True):
        for name in ("id", "input_ids", "loss_mask", "turn", "ended"):
            assert ours[name] == theirs[name]
    assert len(seen) == counts_of(answered)["answers"]
    assert len({body["seed"] for _, body in seen}) == len(seen)


def test_a_chat_endpoint_is_told_the_answers_so_far(asked, tmp_path, monkeypatch, tokenizer):
    lm, seen = load_lm(TARGET), []

    async def reply(self, client, request):
        await asyncio.sleep(0)
        body = request[1]
        seen.append(body["messages"])
        shown = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        limit = json.loads(body["generation_config"])["max_new_tokens"]
        ids = answer(lm, [shown["input_ids"]], self.params, limit, None)[0]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        usage = {"prompt_tokens": len(shown["input_ids"]), "completion_tokens": len(ids)}
        reason = "stop" if ids[-1] in lm.info.eos_ids else "length"
        return {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}

    monkeypatch.setattr(ServerEngine, "_ask", reply)
    server = ServerConfig(dialect="transformers")
    rows = rows_of(make_responses(asked, tmp_path / "out", engine="openai", server=server))
    assert all(row["retokenised"] for row in rows) and len(seen) > NUM_ROWS
    users = [message["content"] for message in conversation(2) if message["role"] == USER]
    longest = max((said for said in seen if said[0]["content"] == users[0]), key=len)
    assert [message["content"] for message in longest if message["role"] == USER] == users
    (row,) = [row for row in rows if row["id"] == "row-2"]
    said = [tokenizer.decode(row["input_ids"][a:b], skip_special_tokens=True) for a, b in spans(row["loss_mask"])]
    assert [message["content"] for message in longest if message["role"] == ASSISTANT] == said[:-1]
    assert row["text"] == "".join(said)


def training_data(source: Path, root: Path) -> list:
    """What trainings read of the first turns: texts, features and labels."""
    texts = make_responses(make_prompts(source, root / "prompts", turns="first"), root / "responses")
    labels = acceptance.AcceptanceConfig(texts, TARGET, root / "labels", "embedded:draft", num_threads=1)
    states = features.FeaturesConfig(texts, TARGET, root / "features", num_threads=1)
    data = ResponsesDataset(texts, TARGET, load_lm(TARGET).info.identity)
    return [data, AcceptanceDataset(acceptance.run(labels)), FeatureDataset(features.run(states))]


def test_artefacts_of_earlier_versions_give_the_same_training_data(source, tmp_path, monkeypatch):
    news = training_data(source, tmp_path / "new")
    for stage in (responses, features, acceptance):
        added = ("turn",) if stage is features else ("turn", "loss_mask")
        monkeypatch.setattr(stage, "FIELDS", tuple(spec for spec in stage.FIELDS if spec.name not in added))
    monkeypatch.setattr(prompts, "FIELDS", prompts.FIELDS[:-1])
    olds = training_data(source, tmp_path / "old")
    assert "loss_mask" not in rows_of(tmp_path / "old" / "labels")[0]
    assert "later" not in rows_of(tmp_path / "old" / "prompts")[0]
    for new, old in zip(news, olds, strict=True):
        assert len(new) == len(old) == NUM_ROWS
        for i in range(NUM_ROWS):
            assert all(torch.equal(new[i][name], old[i][name]) for name in new[i])
        assert new.answers.lengths([1, 2, 4]).tolist() == old.answers.lengths([1, 2, 4]).tolist()


def test_prompts_with_later_turns_are_asked_by_the_bench_as_the_file_is(asked, source):
    ours = read_prompts(str(asked), TARGET, turns="all")
    for own, theirs in zip(ours, read_prompts(str(source), TARGET, turns="all"), strict=True):
        assert (own.prompt_ids, own.later, own.messages) == (theirs.prompt_ids, theirs.later, theirs.messages)
    assert not any(prompt.later for prompt in read_prompts(str(asked), TARGET, turns="first"))


def test_inspect_shows_every_answer_and_every_question(asked, answered, capsys):
    inspect(InspectConfig(answered, row=2))
    shown = capsys.readouterr().out
    assert shown.count("⟦") == len(spans(rows_of(answered)[2]["loss_mask"])) > 1
    inspect(InspectConfig(asked, row=2))
    shown = capsys.readouterr().out
    assert all(wish.strip() in shown for wish in WISHES)


def test_supervised_rows_keep_the_sources_answers_of_all_turns(source, tmp_path, tokenizer):
    directory = make_prompts(source, tmp_path / "out", supervised=True)
    for number, row in enumerate(rows_of(directory)):
        said = [tokenizer.decode(row["input_ids"][a:b], skip_special_tokens=True) for a, b in spans(row["loss_mask"])]
        assert said == [m["content"] for m in conversation(number) if m["role"] == ASSISTANT]
    with pytest.raises(InputError, match="turns: found last, expected all with --supervised"):
        make_prompts(source, tmp_path / "other", supervised=True, turns="last")


def test_what_will_be_learned_is_counted_by_answers():
    masks = [[0, 0, 1, 1, 1, 0, 1], [1, 1], [], [0], [0, 1, 1, 1, 1, 1, 1, 1]]
    values = np.array([bit for mask in masks for bit in mask], dtype=bool)
    offsets = np.cumsum([0, *map(len, masks)])
    lengths, owner = answer_lengths(values, offsets)
    assert (lengths.tolist(), owner.tolist()) == ([3, 1, 2, 7], [0, 0, 1, 4])
    assert [spans(mask) for mask in masks] == [[(2, 5), (6, 7)], [(0, 2)], [], [], [(1, 8)]]
    learned = Supervision.of(lengths)
    assert (learned.answers, learned.answer_tokens, learned.tokens_p50) == (4, 13, 2.5)
    assert learned.early_share == 11 / 13
    assert learned.warning() == (
        "warning: 13 answer tokens (fewer than 60,000) and a median answer of 2 tokens (fewer than 16): a head that "
        "learns from this may slow decoding down, whatever its own validation says. Use more prompts, prompts with "
        "longer answers like those that will be served (docs/training.md)."
    )
    assert Supervision.of(np.full(1000, 100)).warning() is None
    assert "a median answer" not in str(Supervision.of(np.full(10, 100)).warning())
    assert "answer tokens" not in str(Supervision.of(np.full(10_000, 9)).warning())
    assert Supervision.of(np.zeros(0, dtype=np.int64)).answers == 0
    assert answer_mask({"input_ids": [1, 2, 3], "prompt_length": 1}) == [False, True, True]
    assert conversation_numbers(np.array([1, 2, 1, 1, 3])) == [0, 0, 1, 2, 2]


def test_responses_say_what_can_be_learned_of_them(asked, tmp_path, capsys):
    made = make_responses(asked, tmp_path / "out")
    counts, shown = counts_of(made), capsys.readouterr().out
    assert f"{counts['answers']} answers with {counts['response_tokens']} tokens to learn from" in shown
    assert shown.count("warning: ") == 1 and "fewer than 60,000" in shown
