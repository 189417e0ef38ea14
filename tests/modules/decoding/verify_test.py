"""Drafting and verifying: several rows against each row alone, by the same random numbers, lazily and ahead as on a
GPU; and trees against brute force. What a row alone does is enumerated in exactness_test.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.tables import PROMPT, TableLM, V
from torch import Tensor

from draftsmith.eval.bench.runner import read_tree
from draftsmith.modules.decoding.chain import draft_chains, draft_fixed_length
from draftsmith.modules.decoding.stop import ConfidenceStop, FixedLengthStop, SelfVerifyStop
from draftsmith.modules.decoding.tree import DraftTree, StaticTree, chain_parents
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.sampling import Sampler, TorchSource, draw_each, probabilities
from draftsmith.modules.types import SamplingParams

LARGEST_UNIFORM, GREEDY = 1 - 2**-53, SamplingParams()
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7,top_k=2": SamplingParams(temperature=0.7, top_k=2),
    "T=1.5,top_p=0.8": SamplingParams(temperature=1.5, top_p=0.8),
    "greedy": SamplingParams(),
}


class Given(TorchSource):
    """The same uniform over and over."""

    def __init__(self, uniform: float):
        super().__init__(0)
        self._value = uniform

    def _fill(self) -> None:
        self._uniforms = [self._value] * 8 + self._uniforms


def sparse_logits(*shape: int, rng: torch.Generator) -> Tensor:
    """Random, about a third of them without mass, never all; float64, so that both ways compute the same
    distributions."""
    logits = 2 * torch.randn(*shape, generator=rng, dtype=torch.float64)
    hidden = torch.rand(*shape, generator=rng) < 0.35
    hidden[..., 1] = False
    return logits.masked_fill(hidden, -torch.inf)


def drafts(logits: Tensor, params: SamplingParams, seed: int) -> list[DraftTree | None]:
    """Of each row: a drawn chain of 0 to 4 tokens that is often right; a chosen tree; or nothing, as of a row that
    idles."""
    rng, trees = random.Random(seed), list[DraftTree | None]()
    for row in logits:
        kind, size = rng.randrange(5), rng.randrange(5)
        likely = [int(own.argmax()) if rng.random() < 0.6 else rng.randrange(V) for own in row]
        if kind == 0:
            trees.append(None)
        elif kind == 1:
            parents = tuple(rng.randrange(-1, i) for i in range(size))
            trees.append(DraftTree(tuple(likely[parent + 1] for parent in parents), parents))
        else:
            distribution = probabilities(row[:size] + 0.7 * torch.tensor([rng.random() for _ in range(V)]), params)
            drawn = tuple(draw_each(distribution, [TorchSource(rng.randrange(99)) for _ in range(size)]))
            distributions = None if params.greedy or not size else distribution
            trees.append(DraftTree(drawn, chain_parents(size), distributions))
    return trees


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_verified_like_each_alone(setting, seed, ahead):
    params, rows = SETTINGS[setting], 300
    logits = sparse_logits(rows, 5, V, rng=torch.Generator().manual_seed(seed))
    trees = drafts(logits, params, seed)
    sources = [TorchSource(row) for row in range(rows)]
    verdicts = verify(trees, logits, Sampler(params, sources), ahead)
    seen = set()
    for row, (tree, verdict, source) in enumerate(zip(trees, verdicts, sources, strict=True)):
        alone = TorchSource(row)
        if tree is None:
            assert verdict is None
        else:
            assert [verdict] == verify([tree], logits[row : row + 1, : len(tree.tokens) + 1], Sampler(params, [alone]))
            seen.add((tree.draft_prob is None, len(tree.tokens), len(verdict.path)))
        assert source.uniform() == alone.uniform(), "it has been asked for as many numbers"
    kinds = {True} if params.greedy else {False, True}
    assert {(kind, length) for kind, length, _ in seen} >= {(kind, length) for kind in kinds for length in (1, 2, 3)}
    assert {accepted for *_, accepted in seen} >= {0, 1, 2}


POLICIES = {
    "lengths of their own": [lambda k=k: FixedLengthStop(k) for k in (1, 4, 2, 3)],
    "any": [
        lambda: ConfidenceStop(0.5, 1, 4),
        lambda: FixedLengthStop(2),
        lambda: SelfVerifyStop(3),
        lambda: ConfidenceStop(0.9, 2, 3),
    ],
}


class Reader:
    """Rows of prefixes that a drafter has read."""

    def __init__(self, contexts: list[list[int]], lm: TableLM):
        self._prefixes, self._lm = [list(context) for context in contexts], lm

    def read(self) -> tuple[Tensor, Tensor]:
        made = [self._lm.row(tuple(prefix)) for prefix in self._prefixes]
        return torch.stack([logits for logits, _ in made]), torch.stack([state for _, state in made])

    def step(self, tokens: list[list[int]] | Tensor, depth: int) -> tuple[Tensor, Tensor]:
        for prefix, own in zip(self._prefixes, tokens, strict=True):
            assert len(own) <= 1
            prefix += own.tolist() if isinstance(own, Tensor) else own
        return self.read()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policies", [*POLICIES, "known lengths"])
def test_rows_are_drafted_like_each_alone(setting, policies):
    """Rows that stop by themselves, rows that the limit stops, and rows that may not draft at all; and chains of known
    lengths whose tokens the host learns of at the end, as on a GPU."""
    params, lm, end_ids = SETTINGS[setting], TableLM(3), {2}
    made = POLICIES.get(policies, POLICIES["lengths of their own"]) * 3
    cases = [(make, limit, number) for limit in (4, 3, 1, 0) for number, make in enumerate(made)]
    contexts = [[*PROMPT, number % V, limit % V] for _, limit, number in cases]
    stops, limits = [make() for make, *_ in cases], [limit for _, limit, _ in cases]
    sources, seen = [TorchSource(row) for row in range(len(cases))], [[] for _ in cases]
    reader = Reader(contexts, lm)
    if policies == "known lengths":
        ends = [min(stop.max_drafted, limit) for stop, limit in zip(stops, limits, strict=True)]
        trees = draft_fixed_length(reader.read()[0], reader.step, ends, Sampler(params, sources), end_ids)
    else:
        trees = draft_chains(
            *reader.read(), reader.step, stops, limits, Sampler(params, sources), contexts, end_ids,
            on_token=lambda row, view: seen[row].append((view.num_drafted, view.token)),
        )  # fmt: skip
        assert [list(enumerate(tree.tokens, 1)) for tree in trees] == seen
    lengths = set()
    for row, (make, limit, _) in enumerate(cases):
        own, source = Reader([contexts[row]], lm), TorchSource(row)
        sampler = Sampler(params, [source])
        (alone,) = draft_chains(*own.read(), own.step, [make()], [limit], sampler, [contexts[row]], end_ids)
        found = trees[row]
        assert (found.tokens, found.parents, found.draft_calls) == (alone.tokens, alone.parents, alone.draft_calls)
        assert (found.draft_prob is None) == (alone.draft_prob is None) == (params.greedy or not alone.tokens)
        if alone.draft_prob is not None:
            torch.testing.assert_close(list(found.draft_prob), list(alone.draft_prob), atol=1e-15, rtol=0)
        assert sources[row].uniform() == source.uniform(), "it has been asked for as many numbers"
        lengths.add((limit, len(found.tokens)))
    assert {limit for limit, _ in lengths} == {0, 1, 3, 4} and len(lengths) > 5


def test_an_end_token_ends_a_draft_after_its_policy_has_seen_it():
    lm, seen = TableLM(3), []

    class Watching(ConfidenceStop):
        def should_stop(self, view):
            seen.append(view.token)
            return super().should_stop(view)

    def draft(end_ids):
        reader = Reader([list(PROMPT)], lm)
        stop = Watching(0.0, 1, 6)
        sampler = Sampler(GREEDY, [TorchSource(0)])
        return draft_chains(*reader.read(), reader.step, [stop], [6], sampler, [PROMPT], end_ids)[0]

    tokens = draft(()).tokens
    place = tokens.index(tokens[2])
    del seen[:]
    assert draft({tokens[2]}).tokens == tokens[: place + 1] and seen == list(tokens[: place + 1])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("uniform", [0.0, 2**-1074, 0.5, LARGEST_UNIFORM])
def test_a_token_without_mass_is_never_emitted(uniform, ahead):
    rng, params = torch.Generator().manual_seed(7), SETTINGS["T=1"]
    logits, distributions = (
        sparse_logits(200, 3, 6, rng=rng).float(),
        sparse_logits(200, 2, 6, rng=rng).float().softmax(-1),
    )
    drawn = [
        DraftTree(tuple(distribution.argmax(-1).tolist()), (-1, 0), distribution) for distribution in distributions
    ]
    chosen = [DraftTree(tree.tokens, tree.parents) for tree in drawn]
    target = probabilities(logits, params)
    for trees in (drawn, chosen):
        verdicts = verify(trees, logits, Sampler(params, [Given(uniform) for _ in trees]), ahead)
        for row, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            assert target[row, len(verdict.path), verdict.next_token] > 0
            assert all(target[row, i, tree.tokens[i]] > 0 for i in verdict.path)


def test_eagle_1s_tree_has_the_published_shape():
    tree = read_tree("eagle-1")
    assert len(tree.parents) == 25
    assert Counter(tree.depths) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}


def test_paths_become_parents_in_level_order():
    tree = StaticTree.from_paths([[0, 1], [1], [0], [0, 1, 0]])
    assert tree.parents == (-1, -1, 0, 2) and tree.ranks == (0, 1, 1, 0) and tree.level(2) == [2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [([], "at least one"), ([[0], [0]], "each path once"), ([[]], "0 or more"), ([[-1]], "0 or more"),
     ([[0], [1, 0]], r"parent \[1\]")],
)  # fmt: skip
def test_what_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.from_paths(paths)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_tree_of_paths_is_these_paths(leaves, random):
    paths = sorted({tuple(leaf[:end]) for leaf in leaves for end in range(1, len(leaf) + 1)})
    random.shuffle(paths)
    tree = StaticTree.from_paths(paths)
    rebuilt: list[tuple[int, ...]] = []
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        assert -1 <= parent < node
        rebuilt.append((*(() if parent < 0 else rebuilt[parent]), rank))
    assert sorted(rebuilt) == sorted(paths)
    assert [len(path) for path in rebuilt] == list(tree.depths) == sorted(tree.depths)
    assert [node for depth in range(1, 5) for node in tree.level(depth)] == list(range(len(rebuilt)))


@st.composite
def drafted_trees(draw):
    """Nodes of two tokens, so that siblings are often equal, and the target's choice after every node."""
    size = draw(st.integers(1, 9))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    tokens = tuple(draw(st.integers(0, 1)) for _ in range(size))
    return DraftTree(tokens, parents), [draw(st.integers(0, 1)) for _ in range(size + 1)]


class Chooses:
    """A source whose draws are the only token that has mass, as the distributions below are certain."""

    def draw(self, probs):
        assert sorted(probs.tolist()) == [0.0, 1.0]
        return int(probs.argmax())


@given(drafted_trees(), st.sampled_from([0.0, 1.0]))
@settings(max_examples=300, deadline=None)
def test_the_walk_follows_the_targets_choices_to_where_no_node_has_them(case, temperature):
    tree, choices = case
    # Certain distributions, so that sampling walks as greedy does; row 0 is what follows the root.
    logits = torch.full((len(choices), 2), -torch.inf)
    logits[range(len(choices)), choices] = 0.0
    (verdict,) = verify([tree], logits[None], Sampler(SamplingParams(temperature), [Chooses()]))
    # Oracle: from each node look for a child by going over all nodes.
    path, node = [], -1
    while True:
        equal = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == choices[node + 1]]
        if not equal:
            break
        node = equal[0]
        path.append(node)
    assert verdict.path == tuple(path) and verdict.next_token == choices[node + 1]
