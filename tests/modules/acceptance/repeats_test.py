"""Repetitions of a text against an exhaustive search."""

from __future__ import annotations

import random

import pytest
import torch
from oracles.formulas import repeated

from draftsmith.modules.acceptance.repeats import RepeatIndex
from draftsmith.modules.decoding.stop import DraftView


def by_search(text: list[int], drafted: list[int], token: int) -> float:
    half, followed = repeated(text, text + drafted)
    return half if followed == token else -half


def copying_text(seed: int, length: int) -> list[int]:
    """Return a text over few tokens with repeated passages, so that every size occurs."""
    rng = random.Random(seed)
    text = [rng.randrange(6) for _ in range(12)]
    while len(text) < length:
        start = rng.randrange(len(text) - 10)
        text += text[start : start + rng.randrange(2, 11)] if rng.random() < 0.5 else [rng.randrange(6)]
    return text


def scores(text: list[int], start: int, drafted: list[int]) -> list[float]:
    index = RepeatIndex()
    index.begin_draft(text[:start])
    return [index.score_next(token) for token in drafted]


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_an_exhaustive_search(seed):
    rng = random.Random(100 + seed)
    text, starts = copying_text(seed, 80), [1, 2, 9, 30, 31, 79]
    drafted = [
        [text[s + j] if s + j < 80 and rng.random() < 0.7 else rng.randrange(6) for j in range(9)] for s in starts
    ]
    expected = [
        [by_search(text[:start], own[:j], token) for j, token in enumerate(own)]
        for start, own in zip(starts, drafted, strict=True)
    ]
    index, found = RepeatIndex(), list[list[float]]()
    for start, own in zip(starts, drafted, strict=True):
        index.begin_draft(text[:start])
        found.append([index.score_next(token) for token in own])
    assert found == expected
    assert {-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0} >= {value for own in expected for value in own}
    assert any(value != 0 for own in expected for value in own)


def test_scores_follow_a_growing_text_and_reset_with_the_prompt():
    text, seen = copying_text(7, 60), RepeatIndex()

    def shown(context: list[int], drafted: list[int]) -> list[float]:
        nothing = torch.empty(0, 0)
        views = [DraftView(n + 1, token, nothing, nothing, None, context=context) for n, token in enumerate(drafted)]
        return [seen.score(view) for view in views]

    for start in (20, 23, 40, 41):
        drafted = text[start : start + 4]
        assert shown(text[:start], drafted) == scores(text, start, drafted)
    assert any(RepeatIndex.SIZES[-1] / 2 in shown(text[:start], text[start : start + 4]) for start in (42, 50))
    # Another text, at first shorter than what was read of the last one: nothing of that one is left.
    other = copying_text(8, 60)
    seen.reset()
    for start in (1, 9, 20, 31, 50):
        drafted = [other[start], *text[start + 1 : start + 4]]
        expected = [by_search(other[:start], drafted[:j], token) for j, token in enumerate(drafted)]
        assert shown(other[:start], drafted) == expected
