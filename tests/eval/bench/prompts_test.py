"""Prompts of a bench: files, tasks and benchmarks by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worlds import CONTEXT

from draftsmith.data.text.template import load_chat_tokenizer
from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.measuring import PromptRunner
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts, read_questions, task_sources
from draftsmith.eval.bench.results import failures_of, read_rows
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeTrace
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.types import InputError

NEW_TOKENS = 6
FILES = {
    "talk.jsonl": [
        {"question_id": 81, "category": "writing", "turns": ["Rename a to b", "Now to c", "And to d"],
         "language": "en"},
        {"question_id": 82, "category": "writing", "turns": ["Explain this function"], "language": "de"},
        {"question_id": 83, "category": "writing", "turns": ["Sort these imports"]},
    ],
    "share.json": [
        {"id": "s", "conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Say hello"},
            {"from": "gpt", "value": "A RECORDED ANSWER"}, {"from": "human", "value": "Say it again"},
        ]},
    ],
    "plain.jsonl": [{"prompt": "Add a docstring", "task": "own"}, {"prompt": "rename " * 400}, {"prompt": "Wrap it"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    for name, rows in FILES.items():
        text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        (directory / name).write_text(text)
    (directory / "README.md").write_text("no prompts")
    return directory


@pytest.fixture(scope="module")
def config(models, tasks, tmp_path_factory) -> BenchConfig:
    return BenchConfig(
        target=models["target"], head=models["draft"], data=str(tasks), methods="spec:k=3", limit=2, repeats=2,
        max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature="0,1", by="turn,task,language",
        output=tmp_path_factory.mktemp("tasks-bench"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(config) -> tuple[int, dict, list[dict]]:
    """Exit code, results.json and rows."""
    code = bench.run(config)
    return code, json.loads((config.output / "results.json").read_text()), read_rows(config.output)


def test_each_file_is_a_task_and_limited_by_itself(found):
    _, _, rows = found
    asked = {(row["task"], row["id"], row["turn"]) for row in rows}
    talk = {("talk", "81", turn) for turn in (1, 2, 3)} | {("talk", "82", 1)}
    assert asked == talk | {("share", "s", 1), ("share", "s", 2), ("plain", "0", 1), ("plain", "1", 1)}


def test_a_later_turn_holds_the_answers_of_ar(found, config):
    """The oracle writes the conversation by hand with the tokenizer's own template."""
    _, _, rows = found
    tokenizer = load_chat_tokenizer(config.target)
    for temperature in (0.0, 1.0):
        own = {(row["method"], row["id"], row["turn"]): row for row in rows if row["temperature"] == temperature}
        for name, opening, users in (
            ("81", [], ["Rename a to b", "Now to c", "And to d"]),
            ("s", [{"role": "system", "content": "Be brief."}], ["Say hello", "Say it again"]),
        ):
            messages = [*opening]
            for turn, text in enumerate(users, start=1):
                messages.append({"role": "user", "content": text})
                ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
                row = own["ar", name, turn]
                assert row["prompt_ids"] == list(ids["input_ids"] if hasattr(ids, "keys") else ids)
                assert own["spec:k=3", name, turn]["prompt_tokens"] == row["prompt_tokens"]
                said = tokenizer.decode(row["token_ids"], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": said})
    greedy = [row for row in rows if row["temperature"] == 0 and row["error"] is None]
    answers = {(row["method"], row["id"], row["turn"]): row["token_ids"] for row in greedy}
    assert all(answers["spec:k=3", name, turn] == answers["ar", name, turn] for _, name, turn in answers)


def test_temperatures_have_rows_of_their_own_against_their_own_baseline(found):
    _, results, rows = found
    assert [(row["method"], row["temperature"]) for row in results["methods"]] == [
        ("ar", 0.0), ("spec:k=3", 0.0), ("ar", 1.0), ("spec:k=3", 1.0)
    ]  # fmt: skip
    assert [row["matches_ar"] for row in results["methods"]] == [True, True, None, None]
    for row in results["methods"]:
        own = [r for r in rows if (r["method"], r["temperature"]) == (row["method"], row["temperature"])]
        own = [r for r in own if r["error"] is None]
        base = [r for r in rows if (r["method"], r["temperature"]) == ("ar", row["temperature"])]
        rate, base_rate = (sum(r["tokens"] for r in part) / sum(r["cpu_s"] for r in part) for part in (own, base))
        assert row["speedup"] == pytest.approx(rate / base_rate)
        by_task = {part["name"]: part for part in row["by"]["task"]}
        assert set(by_task) == {"talk", "share", "plain"} and by_task["share"]["prompts"] == 2
        assert row["macro_tau"] == pytest.approx(sum(part["tau"] for part in by_task.values()) / 3)


def test_any_column_of_the_rows_divides_the_numbers_and_one_of_none_is_refused(found, config, tmp_path):
    _, results, rows = found
    for row in results["methods"]:
        own = [r for r in rows if (r["method"], r["temperature"]) == (row["method"], row["temperature"])]
        for name, ids in (("en", {"81"}), ("de", {"82"}), ("none", {"s", "0"})):
            part = next(part for part in row["by"]["language"] if part["name"] == name)
            asked = [r for r in own if r["id"] in ids and r["error"] is None]
            assert part["prompts"] == len(asked) and part["tokens"] == sum(r["tokens"] for r in asked)
            assert part["tau"] == part["tokens"] / sum(r["num_target_calls"] for r in asked) and part["speedup"] > 0
    with pytest.raises(InputError, match="by: found route, expected context, turn, kind, task, language, or a column"):
        bench.run(dataclasses.replace(config, by="task,route", output=tmp_path))


def test_a_prompt_that_is_too_long_is_reported_and_the_others_are_measured(found):
    code, results, rows = found
    assert code == 1
    (first, second) = results["failures"]
    assert (first["task"], first["id"], first["turn"]) == ("plain", "1", 1)
    assert first["error"].endswith(f"no room for an answer in the target's context of {CONTEXT}")
    assert (first["temperature"], second["temperature"]) == (0.0, 1.0)
    assert results["methods"][0]["prompts"] == 7 and failures_of(rows) == results["failures"]


def test_a_set_in_the_layout_of_fastchat_is_named_by_its_folders(tmp_path):
    for task in ("qa", "sum"):
        (tmp_path / task / "reference_answer").mkdir(parents=True)
        (tmp_path / task / "question.jsonl").write_text('{"question_id": 1, "turns": ["Hello"]}\n')
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "1 + 1"}\n')
    names = [name for name, _ in task_sources(str(tmp_path))]
    assert names == ["gsm8k", "qa", "sum"]
    one = f"{tmp_path}/gsm8k.jsonl"
    assert task_sources(one) == [("", one)], "its rows name their tasks"
    assert task_sources(f"{one}, embedded:prompts") == [("gsm8k", one), ("prompts", "embedded:prompts")]
    with pytest.raises(InputError, match="two files named gsm8k"):
        task_sources(f"{one},{one}")


def test_a_directory_of_splits_is_one_data_set(tmp_path):
    for split in ("train", "test-00000-of-00001"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "Hello"}\n')
    assert task_sources(str(tmp_path)) == [("", str(tmp_path))]
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "1 + 1"}\n')
    assert len(task_sources(str(tmp_path))) == 3


def prompt_runner(runner, **changes) -> PromptRunner:
    settings = dict(tokenizer=None, context=50, room=50, max_new_tokens=4, repeats=1, seed=0)
    return PromptRunner({0.0: {"ar": answer, "other": runner}}, **{**settings, **changes})


def answer(prompt, max_new_tokens, seed):
    return Generation([1], DecodeTrace(prefill_emitted=1), True)


def raising(error: BaseException):
    def runner(prompt, max_new_tokens, seed):
        if prompt == [13]:
            raise error
        return answer(prompt, max_new_tokens, seed)

    return runner


UNLUCKY, FINE = BenchPrompt("unlucky", [13], "t", number=0), BenchPrompt("fine", [7], "t", number=1)


@pytest.mark.parametrize("error", [ValueError("no\nsuch shape"), RuntimeError("no\nsuch shape")])
def test_a_prompt_that_a_method_fails_on_is_left_out_for_all_methods(error):
    run = prompt_runner(raising(error)).run
    rows = [row for number, prompt in enumerate((UNLUCKY, FINE)) for row in run(prompt, number, 0.0)]
    assert [(row["method"], row["id"], row["error"] is None) for row in rows] == [
        ("ar", "unlucky", False), ("other", "unlucky", False), ("ar", "fine", True), ("other", "fine", True)
    ]  # fmt: skip
    assert rows[0]["error"] == f"other: {type(error).__name__}: no such shape"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("a defect"), KeyError("a defect")])
def test_interruptions_and_defects_are_not_taken_for_bad_prompts(error):
    with pytest.raises(type(error)):
        list(prompt_runner(raising(error)).run(UNLUCKY, 0, 0.0))
    with pytest.raises(type(error)):
        prompt_runner(raising(error)).warm_up([UNLUCKY, FINE])


def test_turns_in_parquet_and_messages_in_json_are_the_same_questions_with_their_categories(models, tmp_path):
    """As SPEED-Bench has them."""
    asked = [("coding", ["Rename a to b", "Now to c"]), ("writing", ["Say hello"]), ("coding", ["Sort these imports"]),
             ("writing", ["Write a line", "And one more", "And the last"]), ("coding", ["Explain it"])]  # fmt: skip
    rows = [{"question_id": f"q{n}", "category": category, "turns": turns} for n, (category, turns) in enumerate(asked)]
    files = tmp_path / "test.parquet", tmp_path / "qualitative.jsonl"
    pq.write_table(pa.Table.from_pylist(rows), files[0])
    with files[1].open("w") as file:
        for row in rows:
            messages = [{"role": "user", "content": turn} for turn in row.pop("turns")]
            file.write(json.dumps({**row, "messages": messages}) + "\n")
    target = Checkpoint(models["target"])
    (found,), again = (read_questions([("", str(file))], target, None, None, 4, "all") for file in files)
    assert again == [found]
    assert [(prompt.id, prompt.task, prompt.number) for prompt in found] == [
        ("q0", "coding", 0), ("q1", "writing", 1), ("q2", "coding", 2), ("q3", "writing", 3)
    ]  # fmt: skip
    assert found[3].later == ("And one more", "And the last")
    (named,) = read_questions([("speed", str(files[0]))], target, None, "coding", 2, "all")
    assert [(prompt.id, prompt.task) for prompt in named] == [("q0", "speed"), ("q2", "speed")]
    for turns in ("first", "last"):
        parquet, lines = (read_prompts(str(file), models["target"], turns=turns) for file in files)
        assert parquet == lines
