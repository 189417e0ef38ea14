"""SPEED-Bench's files as its two scripts write them: Parquet with `turns`, and JSONL with `messages` of users alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.eval.bench.prompts import read_prompts, read_questions

SCHEMA = pa.schema([
    *((name, pa.string()) for name in ("question_id", "category", "sub_category")), ("turns", pa.list_(pa.string())),
    *((name, pa.string()) for name in ("source", "src_id", "difficulty")), ("multiturn", pa.bool_()),
])  # fmt: skip
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


def test_both_layouts_are_the_same_questions_with_their_categories(models, files):
    (found,), again = (read_questions([("", str(file))], models["target"], None, None, 4, "all") for file in files)
    assert again == [found]
    assert [(prompt.id, prompt.task, prompt.number) for prompt in found] == [
        ("q0", "coding", 0), ("q1", "writing", 1), ("q2", "coding", 2), ("q3", "writing", 3)
    ]  # fmt: skip
    assert found[3].later == ("And one more", "And the last")
    (named,) = read_questions([("speed", str(files[0]))], models["target"], None, "coding", 2, "all")
    assert [(prompt.id, prompt.task) for prompt in named] == [("q0", "speed"), ("q2", "speed")]
    for turns in ("first", "last"):
        parquet, lines = (read_prompts(str(file), models["target"], turns=turns) for file in files)
        assert parquet == lines
