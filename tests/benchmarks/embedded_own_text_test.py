"""A pair of one's own conversations: which turns are taken, what is refused, and that a build comes to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.benchmarks.embedded import build
from draftsmith.benchmarks.embedded.own_text import own_turns
from draftsmith.launch.cli import main_of


def said(question: str, answer: str) -> str:
    """A conversation whose later turns are not looked at."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}, {"from": "human", "value": "And?"}]
    return json.dumps({"conversations": turns}, ensure_ascii=False) + "\n"


def written(path: Path, count: int, name: str = "Q") -> Path:
    path.write_text(
        "".join(said(f"{name} {n} of the day", f" The answer to {name} is {n * n}. ") for n in range(count))
    )
    return path


def test_turns_are_the_first_ones_of_every_file(tmp_path):
    files = [written(tmp_path / "chat.jsonl", 300), written(tmp_path / "maths.jsonl", 100, "M")]
    turns = own_turns(files, seed=0)
    assert len(turns) == 400 and {turn.task for turn in turns} == {"chat", "maths"}
    assert all(turn.answer.startswith("The answer to") and turn.answer.endswith(".") for turn in turns)
    share = {split: sum(turn.split == split for turn in turns) / 400 for split in ("train", "dev", "test")}
    assert share["dev"] == pytest.approx(0.1, abs=0.05) and share["test"] == pytest.approx(0.1, abs=0.05)
    assert own_turns(files, seed=0) == turns != own_turns(files, seed=1)
    splits = {turn.prompt: turn.split for turn in turns}
    assert all(splits[turn.prompt] == turn.split for turn in own_turns(files[:1], seed=3))  # by content alone


def test_an_answer_is_there_once_and_a_line_may_hold_any_character(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(said("a\u2028b", "same") + said("c", "same") + said("d", "other\u0085"), "utf-8")
    assert {(turn.prompt, turn.answer) for turn in own_turns([path], 0)} == {("a\u2028b", "same"), ("d", "other")}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (said("a", "b") + "{}\n", "text: found line 2 of"),
        (said("a", "b") + "no JSON\n", "text: found line 2 of"),
        ('{"conversations": [{"value": "alone"}]}\n', "text: found line 1 of"),
        ("", "text: found line 1 of"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(tmp_path, text, told, capsys):
    path = tmp_path / "chat.jsonl"
    path.write_text(text)
    assert main_of(build.BuildConfig, build.run, ["--text", str(path), "--output", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
