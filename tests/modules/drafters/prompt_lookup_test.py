"""Prompt lookup, against a search through the whole text."""

from __future__ import annotations

import random

import pytest
import torch

from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import SamplingParams

NOTHING = torch.empty(0, 0)


def by_search(text: list[int], k: int, ngram: int) -> list[int]:
    """What followed the longest suffix of `ngram` tokens or fewer that stood in the text before, the last time."""
    for n in range(ngram, 0, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if n <= len(text) and ends:
            return text[ends[-1] : ends[-1] + k]
    return []


def drafted(drafter: PromptLookupDrafter, most: int = 9) -> list[int]:
    tree = drafter.propose(most, Sampler(SamplingParams(), TorchSource(0)))
    assert tree.is_chain and tree.draft_prob is None
    return list(tree.tokens)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("k", "ngram"), [(1, 1), (4, 2), (6, 3)])
def test_drafts_are_those_of_a_search(seed, k, ngram):
    rng = random.Random(seed)
    drafter, found = PromptLookupDrafter(k, ngram), 0
    for _ in range(2):  # the second prompt's drafts know nothing of the first
        text = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        drafter.start(text[:-1], NOTHING, text[-1])
        while len(text) < 60:
            most = rng.randrange(1, 8)
            expected = by_search(text, min(k, most), ngram)
            assert drafted(drafter, most) == expected
            found += bool(expected)
            emitted = [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
            drafter.advance(Outcome(tuple(emitted), 0, NOTHING, NOTHING))
            text += emitted
    assert found > 20
