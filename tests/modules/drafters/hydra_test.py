"""Hydra's heads: their loss as the paper's formulas have it, prefix attention, and nodes by their paths' tokens."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from table_methods import random_hydra_heads
from table_models import H, TableLM, V
from torch import Tensor

from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.drafters.hydra import HydraHead, HydraSettings
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import FeatureBatch, SamplingParams

PLUS = pytest.mark.parametrize("plus", [False, True], ids=["hydra", "hydra++"])
LLAMA = LlamaConfig(V, H, 8, 1, 1, 1, H, 32)
LENGTHS = (9, 7)


def batch(packed: bool = False) -> FeatureBatch:
    rng, shape = torch.Generator().manual_seed(0), (2, 9)
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    fields = {
        "input_ids": torch.randint(V, shape, generator=rng),
        "features": torch.randn(*shape, H, generator=rng, dtype=torch.float64),
        "loss_mask": real & (torch.rand(shape, generator=rng) < 0.7),
        "position_ids": torch.arange(9).expand(shape),
    }
    if packed:
        return FeatureBatch(**{name: value[real][None] for name, value in fields.items()}, lengths=LENGTHS)
    return FeatureBatch(**fields)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def prefix(head: HydraHead, states: Tensor) -> Tensor:
    """[T, H] -> the same: one Llama decoder layer and its final norm over states [T, H], token by token."""
    (layer,) = head.layers
    eps = head.config.llama.rms_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def turned(x: Tensor, position: int) -> Tensor:
        half = H // 2
        angles = torch.tensor([position * 10000.0 ** (-2 * i / H) for i in range(half)]).double()
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    read = norm(states, layer.input_layernorm.weight)
    attention, found = layer.self_attn, []
    for t in range(len(states)):
        query = turned(attention.q_proj.weight @ read[t], t)
        keys = torch.stack([turned(attention.k_proj.weight @ read[s], s) for s in range(t + 1)])
        values = torch.stack([attention.v_proj.weight @ read[s] for s in range(t + 1)])
        mixed = torch.softmax(keys @ query / math.sqrt(H), 0) @ values
        x = states[t] + attention.o_proj.weight @ mixed
        y, mlp = norm(x, layer.post_attention_layernorm.weight), layer.mlp
        x = x + mlp.down_proj.weight @ (silu(mlp.gate_proj.weight @ y) * (mlp.up_proj.weight @ y))
        found.append(norm(x, head.norm.weight))
    return torch.stack(found)


def logits_of(head: HydraHead, target: TableLM, number: int, state: Tensor, tokens: list[int]) -> Tensor:
    """Section 3: head i reads the state and the embeddings of the tokens between, by an MLP whose first layer has a
    linear way around it and whose later ones are one and the same."""
    assert len(tokens) == number + 1
    net = head.heads[number]
    x = torch.cat([state, *(target._embedding[token] for token in tokens)])
    x = net.skip.weight @ x + net.skip.bias + silu(net.linear.weight @ x + net.linear.bias)
    for _ in range(head.config.num_layers - 1):
        x = x + silu(net.block.linear.weight @ x + net.block.linear.bias)
    if head.config.own_lm_head:
        return head.lm_heads[number].weight @ x + head.lm_heads[number].bias
    return target._lm_head @ x


def states_of(head: HydraHead, states: Tensor) -> Tensor:
    return prefix(head, states) if head.config.prefix_attention else states


@pytest.mark.parametrize(
    ("plus", "loss", "packed"), [(False, "soft", True), (True, "soft", False), (True, "hard", True)], ids=str
)
def test_the_loss_is_the_papers_formula_in_float64(monkeypatch, plus: bool, loss: str, packed: bool) -> None:
    """sum_i lambda^i CE(p_i(. | h_t, x_{t+1..t+1+i}), x_{t+2+i}), or in place of that token the target's distribution
    of it."""
    monkeypatch.setattr("draftsmith.modules.losses.CHUNK_ELEMENTS", 3 * V)
    target, head = TableLM(1), random_hydra_heads(3, plus).requires_grad_(True)
    # Tables of random numbers this large saturate everything: smaller ones leave gradients to compare.
    for weight in head.parameters():
        weight.data *= 0.4
    data, decay = batch(), 0.7
    output = head.loss(batch(packed), target, HydraSettings(head_decay=decay, loss=loss), None)
    terms, counted = [], 0
    for row, length in enumerate(LENGTHS):
        states, ids = states_of(head, data.features[row, :length]), data.input_ids[row].tolist()
        for t in range(length):
            for i in range(head.config.num_heads):
                place = t + 2 + i
                if place >= length or not data.loss_mask[row, place]:
                    continue
                log_q = logits_of(head, target, i, states[t], ids[t + 1 : t + 2 + i]).log_softmax(-1)
                wanted = F.one_hot(torch.tensor(ids[place]), V).double()
                if loss == "soft":
                    wanted = (target._lm_head @ data.features[row, place - 1]).softmax(-1)
                terms.append(decay**i * -(wanted * log_q).sum())
                counted += i == 0
    wanted = torch.stack(terms).sum() / counted
    # Some dozen float64 terms; but the prefix attention's rotations are in float32.
    tolerance = 1e-9 if plus else 1e-12
    assert float((output.loss - wanted).detach()) == pytest.approx(0, abs=tolerance)
    weights = list(head.parameters())
    assert len(weights) == (3 * 8 + 10 if plus else 3 * 4)
    ours, theirs = torch.autograd.grad(output.loss, weights), torch.autograd.grad(wanted, weights)
    assert all(torch.allclose(a, b, rtol=0, atol=10 * tolerance) for a, b in zip(ours, theirs, strict=True))
    assert all(weight.any() for weight in ours)


@PLUS
def test_a_new_head_passes_what_it_reads_of_the_target_through(plus: bool) -> None:
    """So that it repeats the target's own choice, as Medusa's does."""
    shape = HydraHead.new_config(HydraSettings(prefix_attention=plus), LLAMA)
    head, x = HydraHead(shape), torch.randn(5, 3 * H)
    net = head.heads[1]
    assert shape.llama.num_layers == int(plus) and len(head.layers) == int(plus)
    assert torch.equal(net(x), x[:, :H] + F.silu(net.linear.bias))


@PLUS
@pytest.mark.parametrize("rows", [1, 3])
def test_a_node_is_what_the_head_of_its_depth_ranks_behind_the_tokens_of_its_path(plus: bool, rows: int) -> None:
    target, head, rng = TableLM(1), random_hydra_heads(2, plus), torch.Generator().manual_seed(0)
    paths = sorted([[0], [2], [0, 1], [2, 0], [2, 3], [2, 3, 1]], key=lambda path: (len(path), path))
    drafter = TreeDrafter(head.net(target), StaticTree.from_paths(paths), 32, rows)
    texts = [torch.randint(V, (4 + row,), generator=rng).tolist() for row in range(rows)]
    features = [torch.randn(len(text) - 1, H, generator=rng, dtype=torch.float64) for text in texts]
    for row, text in enumerate(texts):
        drafter.begin(row, text[:-1], features[row], text[-1])
    for row, tree in enumerate(drafter.propose([8] * rows, Sampler(SamplingParams(), [TorchSource(0)] * rows))):
        state, found = states_of(head, features[row])[-1], {(): [texts[row][-1]]}
        for path in paths:
            above = found[tuple(path[:-1])]
            ranked = logits_of(head, target, len(path) - 1, state, above).argsort(descending=True)
            found[tuple(path)] = [*above, int(ranked[path[-1]])]
        assert list(tree.tokens) == [found[tuple(path)][-1] for path in paths] and tree.draft_calls == 3


@PLUS
def test_a_chain_reads_what_it_has_drafted(plus: bool) -> None:
    """Over several rounds, whose rejected tokens leave nothing behind."""
    target, head, rng = TableLM(1), random_hydra_heads(2, plus), torch.Generator().manual_seed(0)
    drafter, text = ChainDrafter(head.net(target), [FixedLengthStop(3)], 32), [1, 3]
    features = torch.randn(2, H, generator=rng, dtype=torch.float64)
    drafter.begin(0, text, features, 2)
    text = [*text, 2]
    for emitted in ([0], [1, 2, 3], [3, 0]):
        (tree,) = drafter.propose([8], Sampler(SamplingParams(), [TorchSource(0)]))
        state, chain = states_of(head, features)[-1], text[-1:]
        for i in range(3):
            chain.append(int(logits_of(head, target, i, state, chain).argmax()))
        assert list(tree.tokens) == chain[1:]
        own = torch.randn(len(emitted), H, generator=rng, dtype=torch.float64)
        drafter.commit(0, emitted, own)
        features, text = torch.cat([features, own]), text + emitted


@PLUS
def test_branches_read_the_tokens_of_their_own_drafts(plus: bool) -> None:
    """Side by side from every place of a text, as `logits_of` has each alone."""
    target, head, rng = TableLM(1), random_hydra_heads(5, plus), torch.Generator().manual_seed(1)
    text = torch.randint(V, (7,), generator=rng).tolist()
    features = torch.randn(7, H, generator=rng, dtype=torch.float64)
    branches = BranchDrafter(head.net(target), 3)
    branches.open(text, features)
    starts = [2, 3, 5, 7]
    drafted = branches.draft(starts, 3, [SamplingParams()] * 4)
    states = states_of(head, features)
    for row, start in enumerate(starts):
        chain = [text[start - 1]]
        for i in range(3):
            wanted = logits_of(head, target, i, states[start - 2], chain)
            assert torch.allclose(branches.lm_head(drafted.hidden[row, i], i), wanted, atol=1e-6)  # float32 rotations
            chain.append(int(wanted.argmax()))
        assert drafted.tokens[row].tolist() == chain[1:]
