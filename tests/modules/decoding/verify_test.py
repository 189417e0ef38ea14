"""Drafting and verifying: lazily and ahead, as on a GPU, by the same random numbers; and trees against brute force.
What comes out is enumerated in exactness_test.py."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.formulas import warped
from oracles.tables import PROMPT, TableLM, V, enumerate_branches
from torch import Tensor

from draftsmith.eval.bench.runner import read_tree
from draftsmith.modules.decoding.chain import draft_ahead, draft_chain
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.stop import ConfidenceStop, FixedLengthStop
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


def draft_of(logits: Tensor, params: SamplingParams, rng: random.Random) -> DraftTree:
    """A drawn chain of 0 to 4 tokens that is often right, or a chosen tree, for the target's logits [5, V]."""
    size = rng.randrange(5)
    likely = [int(own.argmax()) if rng.random() < 0.6 else rng.randrange(V) for own in logits]
    if rng.randrange(4) == 0:
        parents = tuple(rng.randrange(-1, i) for i in range(size))
        return DraftTree(tuple(likely[parent + 1] for parent in parents), parents)
    distribution = probabilities(logits[:size] + 0.7 * torch.tensor([rng.random() for _ in range(V)]), params)
    drawn = tuple(draw_each(distribution, [TorchSource(rng.randrange(99)) for _ in range(size)]))
    return DraftTree(drawn, chain_parents(size), None if params.greedy or not size else distribution)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_numbers_computed_ahead_give_the_verdicts_of_the_lazy_ones(setting, seed):
    params, rng, seen = SETTINGS[setting], random.Random(seed), set()
    for number, logits in enumerate(sparse_logits(300, 5, V, rng=torch.Generator().manual_seed(seed))):
        tree, sources = draft_of(logits, params, rng), [TorchSource(number) for _ in range(2)]
        lazy, ahead = (
            verify(tree, logits[: len(tree.tokens) + 1], Sampler(params, source), how)
            for source, how in zip(sources, (False, True), strict=True)
        )
        assert lazy == ahead
        assert len({source.uniform() for source in sources}) == 1, "both ask for as many numbers"
        seen.add((tree.draft_prob is None, len(tree.tokens), len(lazy.path)))
    kinds = {True} if params.greedy else {False, True}
    assert {(kind, length) for kind, length, _ in seen} >= {(kind, length) for kind in kinds for length in (1, 2, 3)}
    assert {accepted for *_, accepted in seen} >= {0, 1, 2}


def chains(draft: TableLM, params: SamplingParams, length: int, last: int | None) -> Iterator[tuple[DraftTree, float]]:
    """All chains that a drafter can draw, with their probabilities. They end early behind the token `last`."""
    grown = [((), (), 1.0)]
    while grown:
        tokens, rows, weight = grown.pop()
        if len(tokens) == length or last in tokens:
            yield DraftTree(tokens, chain_parents(len(tokens)), torch.tensor(rows, dtype=torch.float64)), weight
            continue
        q = warped(draft.row((*PROMPT, *tokens))[0], params)
        grown += [((*tokens, x), (*rows, q), weight * q[x]) for x in range(V) if q[x] > 0]


@pytest.mark.parametrize("last", [None, 0])
@pytest.mark.parametrize("setting", ["T=1", "T=0.7,top_k=2"])
@pytest.mark.parametrize(("length", "support"), [(1, (V,)), (2, (V,)), (3, (3, V)), (4, (2, 3))])
def test_a_block_emits_the_targets_distribution_and_accepts_as_much_as_possible(length, support, setting, last):
    """Over every chain that can be drafted and every outcome, also of chains that end at a token of their own."""
    params, gained = SETTINGS[setting], 0.0
    for seed in range(4):
        target, draft = TableLM(seed, support), TableLM(seed + 50, support)
        # Probabilities that a round begins with some tokens, and that it accepts them all.
        emitted, accepted = defaultdict(float), defaultdict(float)
        for tree, drawn in chains(draft, params, length, last):
            logits = torch.stack([target.row((*PROMPT, *tree.tokens[:i]))[0] for i in range(len(tree.tokens) + 1)])

            def run(source, tree=tree, logits=logits, ahead=bool(seed % 2)):
                return verify(tree, logits, Sampler(params, source), ahead)

            for verdict, weight in enumerate_branches(run):
                tokens = (*tree.tokens[: len(verdict.path)], verdict.next_token)
                for i in range(len(tokens)):
                    emitted[tokens[: i + 1]] += drawn * weight
                    accepted[tokens[:i]] += drawn * weight

        def rows(model, prefix, params=params):
            return warped(model.row((*PROMPT, *prefix))[0], params)

        assert accepted[()] == pytest.approx(1, abs=1e-12)
        for prefix, weight in accepted.items():
            for x, p in enumerate(rows(target, prefix)):
                assert emitted[(*prefix, x)] == pytest.approx(weight * p, abs=1e-12)
            # The most that any verification can accept: tokens that q draws, then those that p continues with.
            p, q = ([rows(model, prefix[:i])[x] for i, x in enumerate(prefix)] for model in (target, draft))
            most = min(math.prod([*q[:i], *p[i:]]) for i in range(len(prefix) + 1))
            one_by_one = math.prod(map(min, p, q))
            assert weight == pytest.approx(most, abs=1e-12) and most >= one_by_one - 1e-12
            gained += most - one_by_one
    if length > 1 and setting == "T=1":
        assert gained > 1e-3


class Reader:
    """A prefix that a drafter has read."""

    def __init__(self, context: Sequence[int], lm: TableLM):
        self._prefix, self._lm = list(context), lm

    def read(self) -> Level:
        logits, state = self._lm.row(tuple(self._prefix))
        return Level(state[None], logits[None])

    def expand(self, tokens: Sequence[int], parents: Tensor | None, depth: int) -> Level:
        (token,) = tokens
        self._prefix.append(token)
        return self.read()


def test_an_end_token_ends_a_draft_after_its_policy_has_seen_it():
    lm, seen = TableLM(3), []

    class Watching(ConfidenceStop):
        def should_stop(self, view):
            seen.append(view.token)
            return super().should_stop(view)

    def draft(end_ids):
        reader, stop, sampler = Reader(PROMPT, lm), Watching(0.0, 1, 6), Sampler(GREEDY, TorchSource(0))
        return draft_chain(reader.read(), reader.expand, stop, 6, sampler, PROMPT, end_ids)

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
        for row, tree in enumerate(trees):
            verdict = verify(tree, logits[row], Sampler(params, Given(uniform)), ahead)
            assert target[row, len(verdict.path), verdict.next_token] > 0
            assert all(target[row, i, tree.tokens[i]] > 0 for i in verdict.path)


def test_eagle_1s_tree_has_the_published_shape():
    tree = read_tree("eagle-1")
    assert len(tree.parents) == 25
    assert Counter(tree.depths) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}


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
    verdict = verify(tree, logits, Sampler(SamplingParams(temperature), Chooses()))
    # Oracle: from each node look for a child by going over all nodes.
    path, node = [], -1
    while True:
        equal = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == choices[node + 1]]
        if not equal:
            break
        node = equal[0]
        path.append(node)
    assert verdict.path == tuple(path) and verdict.next_token == choices[node + 1]


def test_chains_of_known_lengths_use_up_the_numbers_of_the_tokens_that_are_kept():
    """An end token ends a chain: the numbers behind it are left for the verification."""
    end, table = 2, torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def expand(tokens, parents, depth):
        (token,) = tokens
        return Level(table[int(token)][None], table[int(token)][None])

    ended = 0
    for seed, length in zip(range(36), (5, 3, 4) * 12, strict=True):
        found, root = [], expand([seed % 3], None, 0)
        for ahead in (False, True):
            source = TorchSource(seed)
            sampler = Sampler(SamplingParams(1.0), source)
            if ahead:
                tree = draft_ahead(root, expand, length, sampler, (end,))
            else:
                tree = draft_chain(root, expand, FixedLengthStop(9), length, sampler, [0], (end,))
            prob = torch.stack(list(tree.draft_prob))
            found.append((tree.tokens, tree.draft_calls, prob.tolist(), source.uniform()))
        assert found[0] == found[1]
        ended += len(found[0][0]) < length
    assert ended > 5
