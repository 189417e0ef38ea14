"""EAGLE's trees against a slow drafter that reads every path from the beginning with the head's plain forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import PROMPT, H, TableLM, V

from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.stop import RecentRatio
from draftsmith.modules.decoding.tree import DynamicTree, StaticTree
from draftsmith.modules.decoding.tree_rule import TreeRule, TreeTimes
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.net import TreeDrafter
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import SamplingParams

LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=2,
    max_position=32,
)  # fmt: skip


def random_head(seed: int) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig(LLAMA)).double().requires_grad_(False)
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.7)
    return head


class SlowHead:
    """log q of what follows a path of drafted tokens: one whole uncached forward for each."""

    def __init__(self, head: EagleHead, lm: TableLM, tokens: list[int]):
        self.head, self.lm = head, lm
        self.ids, self.features = tokens[1:], lm.features(torch.tensor([tokens[:-1]]))
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def log_prob(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self.known:
            self.known[path] = self._log_prob(path)
        return self.known[path]

    def _log_prob(self, path: tuple[int, ...]) -> torch.Tensor:
        features = self.features
        for end in range(len(path) + 1):
            embeds = self.lm.embed(torch.tensor([[*self.ids, *path[:end]]]))
            hidden = self.head(embeds, features)
            features = torch.cat([features, hidden[:, -1:]], dim=1)
        return self.lm.lm_head(hidden[0, -1]).log_softmax(-1)


def paths_of(tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    return paths


def slow_dynamic(slow: SlowHead, shape: DynamicTree, max_depth: int) -> set[tuple[int, ...]]:
    """EAGLE-2's candidates and choice, written down from the paper with paths and dictionaries."""
    values: dict[tuple[int, ...], float] = {}

    def children(path: tuple[int, ...]) -> list[tuple[int, ...]]:
        log_prob = slow.log_prob(path)
        for token in log_prob.topk(min(shape.topk, V)).indices.tolist():
            values[(*path, token)] = values.get(path, 0.0) + float(log_prob[token])
        return [key for key in values if key[:-1] == path]

    frontier = sorted(children(()), key=lambda path: -values[path])
    for _ in range(min(shape.depth, max_depth - 1)):
        grown = [child for path in frontier for child in children(path)]
        frontier = sorted(grown, key=lambda path: -values[path])[: shape.topk]
    taken: set[tuple[int, ...]] = set()
    while len(taken) < min(shape.nodes, len(values)):
        open_paths = [path for path in values if path not in taken and (len(path) == 1 or path[:-1] in taken)]
        taken.add(max(open_paths, key=lambda path: values[path]))
    return taken


def propose(
    head: EagleHead,
    lm: TableLM,
    shape,
    max_drafted: int,
    tokens: list[int],
    static: bool = False,
    **how,
):
    drafter = TreeDrafter(head.net(lm), shape, 32, static=static, **how)
    features = lm.features(torch.tensor([tokens[:-1]]))[0]
    drafter.begin(0, tokens[:-1], features, tokens[-1])
    return drafter.propose([max_drafted], Sampler(SamplingParams(), [TorchSource(0)]))[0], drafter


@pytest.mark.parametrize("static", [True, False])
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=12, deadline=None)
def test_the_dynamic_tree_is_the_papers(static, seed, topk, depth, nodes, max_drafted):
    shape = DynamicTree(nodes, depth, topk)
    head, lm, tokens = random_head(seed), TableLM(seed, support=(V,)), [*PROMPT, 1, 3]
    tree, _ = propose(head, lm, shape, max_drafted, tokens, static)
    wanted = slow_dynamic(SlowHead(head, lm, tokens), shape, max_drafted)
    found = paths_of(tree)
    assert len(found) == len(set(found)) and max(map(len, found)) <= max_drafted
    assert set(found) == wanted
    assert all(parent < i for i, parent in enumerate(tree.parents))
    assert tree.draft_calls == 1 + min(depth, max_drafted - 1)


def test_a_rule_takes_the_best_of_the_nodes_and_hears_of_every_round():
    head, lm, tokens = random_head(5), TableLM(5, support=(V,)), [*PROMPT, 1, 3]
    everything, _ = propose(head, lm, DynamicTree(12, 2, 2), 6, tokens)

    class Three(TreeRule):
        def choose(self, values):
            self.shown = values
            return 3

    rule = Three(TreeTimes(2.0, 1.0, (10.0, 11.0, 12.0, 13.0)))
    tree, drafter = propose(head, lm, DynamicTree(12, 2, 2), 6, tokens, rules=[rule])
    assert rule.shown == sorted(everything.values, reverse=True)
    best = sorted(zip(everything.values, paths_of(everything), strict=True), reverse=True)[:3]
    assert set(paths_of(tree)) == {path for _, path in best}
    before = rule.pace
    outcome = Outcome((tree.tokens[0], 1), 1, torch.zeros(2, H, dtype=torch.float64), torch.zeros(4, V))
    drafter.advance([outcome])
    kept = 1 - 1 / RecentRatio.MEMORY
    time = 1.5 / before
    assert rule.pace == pytest.approx((1.5 * kept + 2) / (time * kept + (2.0 + 2 * 1.0) + 13.0))
    drafter.advance([outcome])  # a round without a draft
    assert rule.pace == pytest.approx((1.5 * kept + 2) / (time * kept + (2.0 + 2 * 1.0) + 13.0))


@pytest.mark.parametrize("static", [True, False])
@given(st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_the_static_tree_takes_the_ranks_it_names(static, seed, max_drafted):
    shape = StaticTree.from_paths([[0], [2], [0, 1], [2, 0], [2, 3], [2, 0, 0]])
    head, lm, tokens = random_head(seed), TableLM(seed, support=(V,)), [*PROMPT, 1]
    tree, _ = propose(head, lm, shape, max_drafted, tokens, static)
    slow = SlowHead(head, lm, tokens)
    for path in paths_of(tree):
        assert path in tree_paths(slow, shape)
    assert len(tree.tokens) == sum(depth <= max_drafted for depth in shape.depths)


def tree_paths(slow: SlowHead, shape: StaticTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        above = () if parent < 0 else paths[parent]
        paths.append((*above, int(slow.log_prob(above).argsort(descending=True)[rank])))
    return paths
