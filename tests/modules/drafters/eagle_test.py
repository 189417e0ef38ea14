"""EAGLE: alignment, training passes and drafts against its plain forward, and trees against a slow drafter that reads
every path from the beginning."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import drafts
from oracles.drafts import Linear, Spy
from oracles.tables import PROMPT, H, TableLM, V

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.tree import DynamicTree, StaticTree
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.drafters.settings import EagleSettings
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import FeatureBatch, SamplingParams

LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=2,
    max_position=64, qkv_bias=True,
)  # fmt: skip


def make_head(seed: int = 0, num_layers: int = 1) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig.for_target(LLAMA, num_layers)).double()
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.7)
    return head


LENGTHS = (7, 3, 2, 12, 1, 9)


def batch_of(packed: bool = False) -> FeatureBatch:
    """Texts of LENGTHS, each with an answer behind its first tokens and in it a second prompt."""
    rng = torch.Generator().manual_seed(1)
    count, width = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(V, (count, width), generator=rng)
    features = 3 * torch.randn(count, width, H, generator=rng, dtype=torch.float64)
    mask = torch.arange(width) >= torch.tensor([4, 0, 1, 6, 0, 2])[:, None]
    mask[3, 8:10] = False
    return drafts.batch_of(ids, features, mask, LENGTHS, packed)


@pytest.mark.parametrize(("passes", "weights"), [(1, {}), (3, {"feature_weight": 0.5, "token_weight": 2.0})])
def test_the_loss_is_the_papers_over_every_draft(passes, weights):
    """Every text and every token alone, the mean of the passes by their weights; and gradients as autograd has them."""
    head, target, settings = (
        make_head(num_layers=2),
        Linear(V, H),
        EagleSettings(ttt_steps=passes, ttt_step_decay=0.7, **weights),
    )
    sums = {"feature_loss": 0.0, "token_loss": 0.0}
    batch, count, decay = batch_of(), 0, [0.7**j / sum(0.7**i for i in range(passes)) for j in range(passes)]
    for b, length in enumerate(LENGTHS):
        features, ids = batch.features[b : b + 1, :length], batch.input_ids[b, :length]
        embeds = F.pad(target.embed(ids[1:]), (0, 0, 0, passes))[None]
        unrolled = head.unroll(embeds, features, passes)
        for s in range(1, length - 1):  # the state at s gives token s + 1
            if not batch.loss_mask[b, s + 1]:
                continue
            count += 1
            for j in range(min(passes, s)):
                own, wanted = unrolled[j][0, s - 1 - j], features[0, s]
                p, log_q = target.lm_head(wanted).softmax(-1), target.lm_head(own).log_softmax(-1)
                sums["feature_loss"] = sums["feature_loss"] + decay[j] * F.smooth_l1_loss(own, wanted)
                sums["token_loss"] = sums["token_loss"] - decay[j] * (p * log_q).sum()
    oracle = (settings.feature_weight * sums["feature_loss"] + settings.token_weight * sums["token_loss"]) / count
    wanted = torch.autograd.grad(oracle, [*head.parameters()])
    for packed in (False, True):
        output = head.loss(batch_of(packed), target, settings, None)
        assert output.loss.item() == pytest.approx(oracle.item(), rel=1e-9)
        assert all(output.sums[name].item() == pytest.approx(value.item(), rel=1e-9) for name, value in sums.items())
        for ours, theirs in zip(torch.autograd.grad(output.loss, [*head.parameters()]), wanted, strict=True):
            assert (ours - theirs).abs().max() < 1e-9


def test_a_step_reads_noisy_states_and_learns_true_ones():
    head, target, settings, read = make_head(), Linear(V, H), EagleSettings(noise=0.1), []
    unroll, batch = head.unroll, batch_of()
    head.unroll = lambda embeds, states, *rest: read.append(states) or unroll(embeds, states, *rest)
    losses = [head.loss(batch, target, settings, step).loss for step in (None, TrainStep(0, 1, LENGTHS, range(6), 2.0))]
    assert torch.equal(read[0], batch.features) and losses[0] != losses[1]
    real = batch.attention_mask[..., None]
    assert 0.15 < ((read[1] - batch.features) * real).abs().max() <= 0.2  # of their standard deviation, 2


@pytest.mark.parametrize(("prompt", "num_layers"), [(PROMPT, 1), ((1,), 2), ((3, 1, 0, 0, 2), 2)])
def test_the_drafter_computes_what_training_computed(prompt, num_layers):
    """Round after round, the first drafted token comes from the head's teacher-forced row on TRUE features, and the
    j-th from the head unrolled on its own ones: nothing of an old draft is left in the cache, no position is off."""
    lm, head, spy = TableLM(3), make_head(1, num_layers), Spy(3)
    done = generate_one(lm, ChainDrafter(head.net(lm), spy, 64), prompt, SamplingParams(1.0), 24, TorchSource(0))
    emitted = 1
    accepted = set()
    for step, drafted in zip(done.trace.steps, spy.rounds, strict=False):
        ids = [*prompt, *done.tokens[:emitted]]
        features = lm.features(torch.tensor([ids[:-1]]))
        next_ids = torch.tensor([ids[1:]])
        for token, hidden, _ in drafted:
            (rows,) = head.unroll(lm.embed(next_ids), features, 1)
            # float64 apart from the norms, which are float32: their rounding depends on nothing but the row.
            torch.testing.assert_close(hidden, rows[0, -1].detach(), atol=1e-6, rtol=0)
            features = torch.cat([features, rows[:, -1:].detach()], dim=1)
            next_ids = torch.cat([next_ids, torch.tensor([[token]])], dim=1)
        emitted += step.num_emitted
        accepted.add(step.num_accepted)
    assert len(accepted) > 1, "no drafts were accepted: the test does not see the catching up"


def test_a_head_for_a_target_has_what_other_systems_hold_of_its_layers():
    scaling = RopeScaling("llama3", 8.0, original_max_position=64)
    switches = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "sliding_window": 8}
    target = dataclasses.replace(LLAMA, **switches, rope_theta=5e5, rope_scaling=scaling)
    head = EagleHead(EagleConfig.for_target(target))
    names = {name.removeprefix("layers.0.") for name, _ in head.named_parameters()}
    attention = {f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")}
    mlp = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == {"fc.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight"} | attention | mlp
    assert (head.config.llama.rope_theta, head.config.llama.rope_scaling) == (5e5, scaling)
    plain = EagleConfig.for_target(target, rope="plain").llama
    assert plain == dataclasses.replace(head.config.llama, rope_scaling=RopeScaling())


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
            (hidden,) = self.head.unroll(embeds, features, 1)
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
):
    drafter = TreeDrafter(head.net(lm), shape, 32, static=static)
    features = lm.features(torch.tensor([tokens[:-1]]))[0]
    drafter.start(tokens[:-1], features, tokens[-1])
    return drafter.propose(max_drafted, Sampler(SamplingParams(), TorchSource(0))), drafter


@pytest.mark.parametrize("static", [True, False])
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=12, deadline=None)
def test_the_dynamic_tree_is_the_papers(static, seed, topk, depth, nodes, max_drafted):
    shape = DynamicTree(nodes, depth, topk)
    head, lm, tokens = make_head(seed).requires_grad_(False), TableLM(seed, support=(V,)), [*PROMPT, 1, 3]
    tree, _ = propose(head, lm, shape, max_drafted, tokens, static)
    wanted = slow_dynamic(SlowHead(head, lm, tokens), shape, max_drafted)
    found = paths_of(tree)
    assert len(found) == len(set(found)) and max(map(len, found)) <= max_drafted
    assert set(found) == wanted
    assert all(parent < i for i, parent in enumerate(tree.parents))
    assert tree.draft_calls == 1 + min(depth, max_drafted - 1)


@pytest.mark.parametrize("static", [True, False])
@given(st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_the_static_tree_takes_the_ranks_it_names(static, seed, max_drafted):
    shape = StaticTree.from_paths([[0], [2], [0, 1], [2, 0], [2, 3], [2, 0, 0]])
    head, lm, tokens = make_head(seed).requires_grad_(False), TableLM(seed, support=(V,)), [*PROMPT, 1]
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
