"""What ships in data/embedded: prompts split by content, and models as good as their card says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import draftsmith.data.embedded as embedded
from draftsmith.data.embedded.corpus import SOURCES, content_key, parse_function, split_of
from draftsmith.data.embedded.tasks import EDIT_TASKS, HEADLINE_TASKS

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


@pytest.mark.slow
def test_a_few_held_out_prompts_give_what_the_card_claims():
    """An independent sample of the card's own measurement: 4 prompts a task, so wide margins."""
    from draftsmith.data.models.loading import load_lm, load_tokenizer
    from draftsmith.eval.embedded_card import HeldOutPrompt, score_pair, total
    from draftsmith.launch.embedded import card_questions

    target, draft = load_lm("embedded:target"), load_lm("embedded:draft")
    chosen: dict[str, list[HeldOutPrompt]] = defaultdict(list)
    for question in card_questions(ROOT / "prompts.jsonl", load_tokenizer("embedded:target")):
        if question.task in EDIT_TASKS and len(chosen[question.task]) < 4:
            chosen[question.task].append(question)
    scores = score_pair(target, draft, [q for questions in chosen.values() for q in questions], seed=0)
    measured, claimed = total(scores, EDIT_TASKS).rates(), CARD["tasks"]["draft"]["all edits"]
    # 28 prompts of about 100 tokens: three standard errors of a rate near 0.95 clustered by prompt.
    assert abs(measured["greedy_agreement"] - claimed["greedy_agreement"]) < 0.06
    assert abs(measured["alpha"] - claimed["alpha"]) < 0.08
    assert abs(measured["exact"] - claimed["exact"]) < 0.3
