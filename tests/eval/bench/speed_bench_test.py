"""SPEED-Bench's files as its two scripts write them: Parquet with `turns`, and JSONL with `messages` of users alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts, read_questions

SCHEMA = pa.schema([
    *((name, pa.string()) for name in ("question_id", "category", "sub_category")), ("turns", pa.list_(pa.string())),
    *((name, pa.string()) for name in ("source", "src_id", "difficulty")), ("multiturn", pa.bool_()),
])  # fmt: skip
# Categories are not in one piece, so that a group of two consecutive rows would mix them.
ASKED = [
    ("coding", ["Rename a to b", "Now to c"]), ("writing", ["Say hello"]), ("coding", ["Sort these imports"]),
    ("writing", ["Write a line", "And one more", "And the last"]), ("writing", ["Wrap it"]), ("coding", ["Explain it"]),
]  # fmt: skip


def rows_of(asked: list[tuple[str, list[str]]]) -> list[dict]:
    return [
        {"question_id": f"q{number}", "category": category, "sub_category": "", "turns": turns, "source": "a set",
         "src_id": f"set_{number}", "difficulty": "", "multiturn": len(turns) > 1}
        for number, (category, turns) in enumerate(asked)
    ]  # fmt: skip


def write(directory: Path, asked: list[tuple[str, list[str]]]) -> tuple[Path, Path]:
    parquet, lines = directory / "test.parquet", directory / "qualitative.jsonl"
    pq.write_table(pa.Table.from_pylist(rows_of(asked), SCHEMA), parquet)
    with lines.open("w") as file:
        for row in rows_of(asked):
            messages = [{"role": "user", "content": turn} for turn in row.pop("turns")]
            file.write(json.dumps({**row, "messages": messages}) + "\n")
    return parquet, lines


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return write(tmp_path_factory.mktemp("speed-bench"), ASKED)


def asked_ids(questions: list[list[BenchPrompt]]) -> list[list[str]]:
    return [[prompt.id for prompt in part] for part in questions]


def test_both_layouts_are_the_same_questions_category_by_category(models, files):
    found = [read_questions([("", str(file))], models["target"], None, None, 0, "all") for file in files]
    assert found[0] == found[1] and asked_ids(found[0]) == [["q0", "q2", "q5"], ["q1", "q3", "q4"]]
    assert [{prompt.task for prompt in part} for part in found[0]] == [{"coding"}, {"writing"}]
    assert [prompt.number for part in found[0] for prompt in part] == list(range(6))
    assert found[0][1][1].later == ("And one more", "And the last")
    for turns in ("first", "last"):
        parquet, lines = (read_prompts(str(file), models["target"], turns=turns) for file in files)
        assert parquet == lines


def test_the_limit_counts_in_each_category_and_in_a_task_of_another_name_for_all(models, files):
    for file in files:
        found = read_questions([("", str(file))], models["target"], None, None, 2, "all")
        assert asked_ids(found) == [["q0", "q2"], ["q1", "q3"]]
        (named,) = read_questions([("speed", str(file))], models["target"], None, None, 2, "all")
        assert [(prompt.id, prompt.task) for prompt in named] == [("q0", "speed"), ("q1", "speed")]
