"""What ships in data/embedded: prompts split by content, and models as good as their card says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import draftsmith.data.embedded as embedded
from draftsmith.benchmarks.embedded import build, card
from draftsmith.benchmarks.embedded.card import HeldOutPrompt, score_pair, total
from draftsmith.benchmarks.embedded.corpus import SOURCES, content_key, parse_function, read_corpus, split_of
from draftsmith.benchmarks.embedded.language_model import Recipe
from draftsmith.benchmarks.embedded.models import DraftRecipe
from draftsmith.benchmarks.embedded.tasks import EDIT_TASKS, HEADLINE_TASKS
from draftsmith.data.models.loading import load_lm, load_tokenizer
from draftsmith.launch.cli import main_of

ROOT = Path(embedded.__file__).parent
TASKS = (*HEADLINE_TASKS, "complete")
ROWS = [json.loads(line) for line in (ROOT / "prompts.jsonl").read_text().splitlines()]
CARD = json.loads((ROOT / "card.json").read_text())


def test_prompts_come_in_three_splits_with_their_origin():
    assert 3700 <= len(ROWS) <= 3900
    assert set(Counter(row["split"] for row in ROWS)) == {"train", "dev", "test"}
    assert {row["task"] for row in ROWS} == set(TASKS)
    assert all(row["licence"] == SOURCES[row["package"]] for row in ROWS)
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_a_prompts_split_follows_from_the_content_of_its_function():
    checked = 0
    for row in ROWS:
        key = row["id"].removeprefix(f"{row['task']}-")
        assert split_of(key) == row["split"]
        if row["task"] in ("remove_docstring", "remove_type_hints"):  # the answer is the function as it was cut
            assert content_key(parse_function(row["answer"])) == key
            checked += 1
    assert checked > 300


def test_no_function_is_in_two_splits():
    splits = defaultdict(set)
    for row in ROWS:
        splits[row["id"].removeprefix(f"{row['task']}-")].add(row["split"])
    assert all(len(found) == 1 for found in splits.values())


def test_everything_shipped_is_under_thirty_megabytes():
    assert sum(file.stat().st_size for file in ROOT.rglob("*") if file.is_file()) <= 30e6


def test_card_reports_every_task_and_the_bars_are_met():
    tasks = CARD["tasks"]["draft"]
    assert set(TASKS) <= set(tasks)
    headline, edits = tasks["edits and explain"], tasks["all edits"]
    assert headline["alpha"] >= 0.70 and headline["greedy_agreement"] >= 0.82
    assert edits["distinct_4grams"] >= 0.8 and edits["ended"] >= 0.85 and edits["exact"] >= 0.5


def test_the_card_names_the_command_that_makes_it():
    command = (ROOT / "MODEL_CARD.md").read_text().split("Made by `")[1].split("`")[0]
    python, script = command.split()
    repository = ROOT.parents[1]
    assert python == "python" and repository / script == Path(build.__file__)
    assert f"`{command}`" in (repository / "benchmarks/embedded/templates/MODEL_CARD.md").read_text()
    assert subprocess.run([sys.executable, script, "--help"], cwd=repository, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [("--output {chats}", "prompts.jsonl"), ("--output {out} --num-threads many", "--num-threads")],
)
def test_a_build_that_cannot_start_is_one_line(words, said, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("{}")
    argv = words.format(chats=tmp_path / "prompts.jsonl", out=tmp_path / "out").split()
    assert main_of(build.BuildConfig, build.run, argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_build_makes_what_ships(tmp_path, monkeypatch):
    """Of two small packages, in a few steps."""
    for stages in (build.TARGET_STAGES, build.DRAFTS):
        for name, stage in stages.items():
            monkeypatch.setitem(stages, name, shortened(stage))
    small = {"DISTIL_PROMPTS": 4, "SHIPPED_PROMPTS": {"train": 20, "dev": 9, "test": 18}, "CARD_PROMPTS": 1}
    for name, value in small.items():
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(build, "read_corpus", lambda: read_corpus(["rich", "jinja2"]))
    monkeypatch.setattr(card, "MAX_NEW_TOKENS", 4)
    out = build.run(build.BuildConfig(tmp_path / "out", tmp_path / "work", num_threads=1))
    made = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.suffix != ".lock"}
    assert made >= {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*")
        if path.suffix not in (".py", ".pyc") and path.name != "__pycache__"
    }
    assert load_lm(str(out / "draft")).info.num_layers == 2
    rows = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert set(rows[0]) == set(ROWS[0]) and {row["split"] for row in rows} == {"train", "dev", "test"}
    assert {row["package"] for row in rows} == {"rich", "jinja2"}


def shortened(stage):
    """A stage of training, of one step."""
    if isinstance(stage, Recipe):
        return dataclasses.replace(stage, steps=1, tokens_per_step=512)
    if isinstance(stage, tuple):
        return tuple(map(shortened, stage))
    if isinstance(stage, DraftRecipe):
        return dataclasses.replace(stage, start=shortened(stage.start), distil=shortened(stage.distil))
    return stage


@pytest.mark.slow
def test_a_few_held_out_prompts_give_what_the_card_claims():
    """An independent sample of the card's own measurement: 4 prompts a task, so wide margins."""
    target, draft = load_lm("embedded:target"), load_lm("embedded:draft")
    chosen: dict[str, list[HeldOutPrompt]] = defaultdict(list)
    for question in build.card_questions(ROOT / "prompts.jsonl", load_tokenizer("embedded:target")):
        if question.task in EDIT_TASKS and len(chosen[question.task]) < 4:
            chosen[question.task].append(question)
    scores = score_pair(target, draft, [q for questions in chosen.values() for q in questions], seed=0)
    measured, claimed = total(scores, EDIT_TASKS).rates(), CARD["tasks"]["draft"]["all edits"]
    # 28 prompts of about 100 tokens: three standard errors of a rate near 0.95 clustered by prompt.
    assert abs(measured["greedy_agreement"] - claimed["greedy_agreement"]) < 0.06
    assert abs(measured["alpha"] - claimed["alpha"]) < 0.08
    assert abs(measured["exact"] - claimed["exact"]) < 0.3
