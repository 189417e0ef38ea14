"""Typical acceptance against its formula in float64, over all paths of a tree; and that it changes the output."""

from __future__ import annotations

import math

import pytest
import torch
from table_methods import CAPACITY, EAGLE_TREES, method, random_medusa_heads
from table_models import TableLM, V, decoded_distribution, target_distribution, total_variation, warped
from torch import Tensor

from draftsmith.modules.decoding.tree import DraftTree, Typical
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import StaticTreeMethod
from draftsmith.modules.sampling import Sampler
from draftsmith.modules.types import InputError, SamplingParams

# Three levels, siblings, an equal sibling, and nodes in an order of their own.
PARENTS = (-1, -1, 0, 1, 1, 0, 3, -1, 4)


class Recorder:
    """Draws the last token that has mass, and remembers from what."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def accept(self, prob: float) -> bool:
        raise AssertionError("nothing is drawn for acceptance")

    def draw(self, probs: Tensor) -> int:
        self.drawn.append(probs)
        return int(probs.nonzero()[-1])


def accepted_path(tree: DraftTree, laws: list[list[float]], eps: float, delta: float) -> tuple[int, ...]:
    """The formula, written out over every path. laws: of what follows the root, then each node."""
    best: tuple[tuple[float, ...], tuple[int, ...]] = ((0, 0.0), ())
    for node in range(len(tree.tokens)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        total = 0.0
        for step in path:
            law, token = laws[tree.parents[step] + 1], tree.tokens[step]
            entropy = -sum(p * math.log(p) for p in law if p > 0)
            if not law[token] > min(eps, delta * math.exp(-entropy)):
                break
            total += math.log(law[token])
        else:
            if (len(path), total) > best[0]:
                best = ((len(path), total), tuple(path))
    return best[1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("eps", "delta"), [(0.09, 0.3), (0.4, 2.0), (0.2, 0.9)])
@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.6, 4)], ids=str)
def test_the_longest_typical_path_is_accepted_by_the_formula_in_float64(ahead, eps, delta, params):
    rng, lengths = torch.Generator().manual_seed(1), set()
    for _ in range(60):
        tokens = tuple(torch.randint(V, (len(PARENTS),), generator=rng).tolist())
        tree = DraftTree(tokens, PARENTS, typical=Typical(eps, delta))
        logits = 2 * torch.randn(1, len(PARENTS) + 1, V, generator=rng, dtype=torch.float64)
        source = Recorder()
        (verdict,) = verify([tree], logits, Sampler(params, [source]), ahead)
        laws = [warped(row, params) for row in logits[0]]
        path = accepted_path(tree, laws, eps, delta)
        assert verdict.path == path
        (law,) = source.drawn  # the target's own token is drawn once, from what follows the path
        assert law.tolist() == pytest.approx(laws[path[-1] + 1 if path else 0])
        assert verdict.next_token == int(law.nonzero()[-1])
        lengths.add(len(path))
    assert lengths == {0, 1, 2, 3}


def test_the_papers_numbers_are_the_defaults_and_the_bound_itself_is_not_enough():
    assert Typical() == Typical(0.09, 0.3)
    even = torch.full((4,), 0.25)  # exp(-H) = 1/4
    assert not Typical(0.9, 1.0).accepts(even).any() and Typical(0.9, 0.99).accepts(even).all()
    assert not Typical(0.25, 100.0).accepts(even).any() and Typical(0.24, 100.0).accepts(even).all()


def test_the_method_changes_the_distribution_and_says_so():
    """By no little; the exact one beside it does not (exactness_test.py)."""
    target, params = TableLM(1), SamplingParams(temperature=1.0)
    asked = StaticTreeMethod(tree="six", accept="typical", drafter="medusa")
    models = Models(
        target, heads={"medusa": random_medusa_heads(7)}, capacity=CAPACITY, trees={"six": EAGLE_TREES["eagle-static"]}
    )
    found = decoded_distribution(target, lambda: asked.build(models), params, length=3, max_new_tokens=8)
    assert sum(found.values()) == pytest.approx(1)
    assert not asked.lossless and StaticTreeMethod().lossless
    assert total_variation(found, target_distribution(target, params, 3)) > 0.01
    same = decoded_distribution(target, method("medusa-static", target), params, length=3, max_new_tokens=8)
    assert total_variation(found, same) > 0.01


@pytest.mark.parametrize(("settings", "field"), [({"eps": 0}, "eps"), ({"eps": 1}, "eps"), ({"delta": 0}, "delta")])
def test_bad_settings_are_refused(settings, field):
    with pytest.raises(InputError, match=field):
        StaticTreeMethod(accept="typical", **settings)
