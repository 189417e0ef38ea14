"""Chains and trees of a head with captured layers and few tokens, for rows together and alone."""

from __future__ import annotations

import pytest
from quick_heads import KNOWN, captured_head
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.growth import DynamicTree
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

PROMPTS = [[5, 7, 9, 11], [4, 4, 8], [17, 3, 2, 9, 30]]
TREE = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("model") / "lm")), dtype="float64", engine="lean")


@pytest.fixture(scope="module")
def head(lm):
    return captured_head(lm)


def drafters(head, lm, rows):
    yield head.drafter(lm, [FixedLength(4) for _ in range(rows)], 64)
    for shape in (TREE, DynamicTree(nodes=8, depth=3, topk=3)):
        yield head.tree_drafter(lm, shape, 64, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_and_trees_of_rows_are_those_of_each_alone_and_greedy_the_targets(head, lm, temperature):
    params, seen = SamplingParams(temperature), []

    def answers(drafter, numbers):
        sources = [TorchSource(number) for number in numbers]
        return [own.tokens for own in generate(lm, drafter, [PROMPTS[i] for i in numbers], params, 16, sources, ())]

    for together, alone in zip(drafters(head, lm, 3), drafters(head, lm, 1), strict=True):
        propose = together.propose

        def kept(*how, propose=propose):
            seen.extend(trees := propose(*how))
            return trees

        together.propose = kept
        made = answers(together, [0, 1, 2])
        assert made == [answers(alone, [i])[0] for i in range(3)]
        if temperature == 0:
            assert made == answers(None, [0, 1, 2])
    drafted = [token for tree in seen for token in tree.tokens]
    assert drafted and set(drafted) <= set(KNOWN.tolist())
    assert all(not bool(tree.draft_prob[:, 0].any()) for tree in seen if tree.draft_prob is not None)
